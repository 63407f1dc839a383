"""Labs. Each lab is a folder with a config, phases that ranks run, checks of the records, and faults that the checks detect.

definition, rankside   both sides: the parts of a lab; phases on a rank, run and measured one at a time
discover, lab          notebook side: the list of labs and runs, a config from user input; running and judging a lab
bench                  what the labs share that measure ways side by side (bench_NAME)
growth, bystander      checks that every lab can use; a process beside the job, which a lab must not affect
"""

"""Labs. Each lab is a folder with a config, phases that ranks run, checks of the records, and faults that the checks detect.

options, rankside      both sides: the fields of a config; phases on a rank, run and measured one at a time
definition, discover   the parts of a lab; the list of all labs, and of the runs in a folder
configure, lab         notebook side: a config from user input; a lab that is stepped and judged
"""

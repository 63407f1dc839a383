"""Labs: each a folder with a config, phases that ranks run, checks of what was measured, and faults that the checks catch.

options, rankside      both sides: the fields of a config; phases, run and measured one at a time
definition, discover   what a lab is made of; which labs there are
configure, lab         the notebook's side: a config from what a person gave; a lab that is stepped and judged
"""

"""What torchrun runs as each rank: it is forked from the agent, so torch and the kit are loaded already."""

from kit.world.rankside import main

main()

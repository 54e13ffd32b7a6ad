"""What a process finds around it: how it was started, its ranks and their machine, and what all agree on."""

"""What is run beside the package: rigs, the demo, and the upkeep of the series."""

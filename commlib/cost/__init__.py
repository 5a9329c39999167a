"""Cost models of algorithms, the measured table, and the choice of the cheapest algorithm."""

"""Many cases in one job, written down as each one ends: `commlib bench sweep`."""

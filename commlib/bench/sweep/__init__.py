"""`commlib bench sweep`: many cases in one job, each recorded when it ends."""

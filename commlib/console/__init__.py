"""Console: print on terminals. Tables, folded lines, progress bars."""

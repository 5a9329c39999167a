"""Console: output on terminals. Tables, folded lines, progress bars."""

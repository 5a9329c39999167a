"""What is printed on terminals: tables, folded lines, progress bars."""

"""What only a GPU can show, and what can be said of it without one."""

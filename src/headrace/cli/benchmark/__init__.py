"""What `headrace bench` does: open sessions, measure steps, compare with the machine's rates and with other systems."""

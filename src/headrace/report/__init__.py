"""Reports: the record that a run keeps of itself, and one page that shows it."""

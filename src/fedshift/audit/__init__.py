"""What a method costs and what it gives away, measured."""

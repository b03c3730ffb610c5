"""What a method costs and what it gives away, counted instead of believed."""

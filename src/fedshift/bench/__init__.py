"""Many runs, one answer: grids of trainings, their records, and tables of them."""

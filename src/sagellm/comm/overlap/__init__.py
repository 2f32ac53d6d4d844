"""Communication behind computation: schedules and what runs them."""

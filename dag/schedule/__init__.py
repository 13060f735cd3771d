"""When what runs: schedules, the wiring of action lists, their proof, and a plan's way to the wire
and back."""

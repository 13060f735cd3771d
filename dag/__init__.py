"""The model as a graph of operators, and all that can be decided from it: capture, cutting, plans,
schedules, costs, and the execution of a stage. Nothing here does I/O."""

"""What becomes of what replicas give, by method: `round_strategy` says what a strategy is,
`round_strategies` which there are, and each other file has those of one paper."""

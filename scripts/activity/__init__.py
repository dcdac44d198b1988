"""Which neurons fire and which experts are used: traces of a model over a text, cache replays, and what they tell."""

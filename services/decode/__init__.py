"""KV BLOCKS IN, TOKENS OUT: pulls prompts' KV, joins them to the running batch, publishes tokens; a whole engine."""

"""TOKENS IN, KV BLOCKS OUT: computes prompts, samples the first token, offers the blocks under a lease."""

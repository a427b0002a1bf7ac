"""What a scheduler did since it started."""

from dataclasses import dataclass

from services.engine.batch import Batch


@dataclass(slots=True)
class SchedulerCounters:
    """Only ever grow; read by metrics and tests."""

    num_steps: int = 0
    num_steps_mixed: int = 0  # held prefill chunks and decodes together
    num_preemptions: int = 0
    num_prefix_hit_tokens: int = 0  # reused at a first admission or an inbound reservation
    num_prompt_tokens_computed: int = 0  # again after a preemption included
    num_tokens_computed: int = 0

    def count(self, batch: Batch) -> None:
        """Add one computed step."""
        chunks = batch.items[batch.num_decodes :]
        self.num_steps += 1
        self.num_steps_mixed += bool(batch.num_decodes and chunks)
        self.num_tokens_computed += batch.num_tokens
        for item in chunks:
            num_left = item.seq.num_prompt_tokens - item.start
            self.num_prompt_tokens_computed += max(0, min(item.num_tokens, num_left))

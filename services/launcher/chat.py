"""`pdserve chat`: a conversation in the terminal, answers as they stream."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from services.launcher.client import ApiError, served_model, stream_chat


def converse(base_url: str, system: str, temperature: float, max_tokens: int, console: Console) -> None:
    """Reads a line, streams an answer, keeps both; an empty line or the end of input ends it. Raises ApiError."""
    model = served_model(base_url)
    console.print(f"{model} at {base_url}; an empty line ends the conversation", style="dim")
    history = [{"role": "system", "content": system}] if system else []
    while line := _ask(console):
        history.append({"role": "user", "content": line})
        try:
            answer = stream_chat(
                base_url,
                model,
                history,
                lambda text: console.print(Text(text), end="", soft_wrap=True),
                temperature=temperature,
                max_tokens=max_tokens,
            )
        except ApiError as error:
            console.print(f"\n{error}", style="red")
            history.pop()
            continue
        history.append({"role": "assistant", "content": answer.text})
        rate = (answer.num_output_tokens - 1) / max(answer.total_s - answer.first_token_s, 1e-9)
        note = f"{answer.num_output_tokens} tokens, first after {answer.first_token_s:.2f} s, then {rate:.0f}/s"
        console.print(f"\n{note}", style="dim")


def _ask(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        return ""

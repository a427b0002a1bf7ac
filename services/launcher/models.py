"""`pdserve model fetch`: a model's folder, made or fetched once."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from services.runtime import model_store


def fetch(name: str, console: Console) -> Path:
    """The folder of a model, by alias, Hugging Face id or path. Raises ModelStoreError.

    What takes long (the download, the conversion) shows its own progress bar on a terminal.
    """
    return model_store.resolve(name, report=lambda line: console.print(Text(line, style="dim"), soft_wrap=True))

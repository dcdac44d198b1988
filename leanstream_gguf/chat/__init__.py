"""The local desktop chat: a page served by our own server, and what that page needs beside the OpenAI-compatible API.

`store.py` keeps conversations, `discovery.py` finds models and what they need, `routes.py` is the page's API under
/chat/api, `static/` the page itself (no build step, no network beyond the server it came from).
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parent / "static"

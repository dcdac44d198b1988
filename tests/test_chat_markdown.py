"""How the page shows what a model writes: the right elements, nothing live, and only what changed is made again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_page import ChatPage, Program

pytestmark = [pytest.mark.browser, pytest.mark.native]


@pytest.fixture(scope="module")
def chat(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatPage]:
    """The page of a program without a model."""
    folder = tmp_path_factory.mktemp("chat")
    program = Program(folder / "data", folder)
    opened = ChatPage(browser.new_page(), program.url).open()
    yield opened
    assert not opened.errors
    program.stop()


HOSTILE = """\
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> ![p](http://127.0.0.1:9/p.png)
[a](javascript:window.hacked=3) [b](data:text/html,x) [c](https://ok.example/ "t") <javascript:alert(1)> `</code><b>`

| a | <i>b</i> |
|---|---|
| [x](vbscript:x) | **<u>y</u>** |

```html"><script>window.hacked = 4</script>
</pre><iframe src="http://127.0.0.1:9/"></iframe>
```
> <svg onload=window.hacked=5>
- <style>*{display:none}</style> &lt;b&gt;
"""


def test_nothing_a_model_writes_becomes_live(chat: ChatPage) -> None:
    page = chat.page
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    found = page.evaluate(
        """async (text) => {
            const { render } = await import("/js/markdown.js");
            const box = document.createElement("div");
            document.body.append(box);
            for (let n = 1; n <= text.length; n += 7) render(box, text.slice(0, n)); // as it streams in
            render(box, text);
            const all = [...box.querySelectorAll("*")];
            return {
                tags: [...new Set(all.map((e) => e.tagName.toLowerCase()))],
                handlers: all.flatMap((e) => e.getAttributeNames().filter((n) => n.startsWith("on") || n === "srcdoc" || n === "src")),
                links: all.filter((e) => e.tagName === "A").map((e) => e.getAttribute("href")),
                text: box.innerText,
                hacked: window.hacked,
            };
        }""",
        HOSTILE,
    )
    assert not set(found["tags"]) & {"script", "img", "iframe", "style", "i", "u", "b", "object", "link", "form"}
    assert found["handlers"] == [] and found["hacked"] is None
    assert found["links"] == ["http://127.0.0.1:9/p.png", "https://ok.example/"]
    assert "<script>window.hacked = 1</script>" in found["text"] and '</pre><iframe src="http://127.0.0.1:9/">' in found["text"]
    assert all(url.startswith(chat.url) for url in requests)


MARKDOWN = [
    ("# T\n\ntext **b** *i* ~~d~~ `c`", "<h3>T</h3><p>text <strong>b</strong> <em>i</em> <del>d</del> <code>c</code></p>"),
    ("a snake_case_word and 2*3*4 stay", "<p>a snake_case_word and 2<em>3</em>4 stay</p>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
    ("> q\n> r", "<blockquote><p>q\nr</p></blockquote>"),
    ("***\n", "<hr>"),
    ("para\n- item", "<p>para</p><ul><li>item</li></ul>"),
    ("1. one\n\n   more\n2. two", "<ol><li><p>one</p><p>more</p></li><li><p>two</p></li></ol>"),
    ("**open", "<p>**open</p>"),
    ("a \\*b\\* https://x.example/p?q=1.", '<p>a *b* <a href="https://x.example/p?q=1">https://x.example/p?q=1</a>.</p>'),
]


def test_markdown_becomes_the_right_elements(chat: ChatPage) -> None:
    made = chat.page.evaluate(
        """async (texts) => {
            const { render } = await import("/js/markdown.js");
            return texts.map((text) => { const box = document.createElement("div"); render(box, text); return box.innerHTML; });
        }""",
        [text for text, _ in MARKDOWN],
    )
    plain = [re.sub(r' (class|target|rel)="[^"]*"', "", html) for html in made]
    assert plain == [expected for _, expected in MARKDOWN]


def test_long_answers_keep_the_elements_that_did_not_change(chat: ChatPage) -> None:
    same, changed = chat.page.evaluate(
        """async () => {
            const { render } = await import("/js/markdown.js");
            const box = document.createElement("div");
            const text = "Some **words** in a paragraph.\\n\\n".repeat(2000);
            render(box, text);
            const first = box.children[100];
            const observer = new MutationObserver(() => {});
            observer.observe(box, { childList: true, subtree: true, characterData: true });
            for (let i = 0; i < 10; i++) render(box, text + "and more".repeat(i));
            const records = observer.takeRecords();
            const changed = records.reduce((n, r) => n + Math.max(1, r.addedNodes.length + r.removedNodes.length), 0);
            return [box.children[100] === first, changed];
        }"""
    )
    assert same and changed < 100

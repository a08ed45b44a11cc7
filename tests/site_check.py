"""Check that pages of the built site load nothing from the network: `python -m tests.site_check FOLDER`."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADING_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect"}


class _Loads(HTMLParser):
    """Addresses that a browser loads with a page, without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.found += [given[name] for name in ("src", "srcset", "poster", "data") if name in given]
        if tag == "link" and LOADING_RELATIONS & {*given.get("rel", "").split()}:
            self.found.append(given.get("href", ""))


def remote_loads(page: Path) -> list[str]:
    """Return the addresses on other hosts that an HTML or CSS file loads."""
    text = page.read_text()
    if page.suffix == ".css":
        found = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", text)
    else:
        parser = _Loads()
        parser.feed(text)
        found = parser.found
    return [each for each in found if re.match(r"(?:https?:)?//", each)]


def main(site: Path) -> int:
    """Print each remote address, and return 1 if there is one."""
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    faults = [f"{page}: loads {each}" for page in pages for each in remote_loads(page)]
    print("\n".join(faults) or f"{len(pages)} HTML and CSS files load nothing from the network")
    return int(bool(faults) or not pages)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

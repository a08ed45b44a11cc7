"""What `stores.py` compares with, run by an interpreter that has the peers: `python stores_peers.py
NAME` serves requests.

Contestants, settings and work are those of loader_peers.py; only what they read lies behind the
link, with their caches as bounded as ours. Where we mix 8 blocks of 512 samples, webdataset has its
buffer of 5,000, MosaicML a shuffle block of 16,384 (three of its shards).
"""

import os
import sys
from pathlib import Path
from typing import Any

from loader_peers import Litdata, Mosaic, Webdataset, written
from serving import Task, serve


def address(name: str, task: Task) -> str:
    return f"s3://{os.environ['STORES_BUCKET']}/{written(name, task).name}"


class MosaicS3(Mosaic):
    def where(self, task: Task) -> dict[str, Any]:
        from streaming.base.util import clean_stale_shared_memory

        # of a pass before, whose process was ended: it would be waited for
        clean_stale_shared_memory()
        room = {"cache_limit": f"{os.environ['STORES_CACHE_GB']}gb", "shuffle_block_size": 16384}
        return {
            "remote": address("mosaic", task),
            "local": f"{os.environ['STORES_CACHE']}/mosaic",
            **room,
        }


class LitdataS3(Litdata):
    def where(self, task: Task) -> dict[str, Any]:
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = (
            True  # the link has no TLS, and litdata no setting for that
        )
        options = {"endpoint_url": os.environ["S3_ENDPOINT_URL"], "region_name": "us-east-1"}
        cache = Path(os.environ["STORES_CACHE"]) / "litdata"
        cache.mkdir(exist_ok=True)
        room = {"cache_dir": str(cache), "max_cache_size": f"{os.environ['STORES_CACHE_GB']}GB"}
        return {"input_dir": address("litdata", task), "storage_options": options, **room}


class WebdatasetHttp(Webdataset):
    def shard(self, path: Path) -> str:
        return f"{os.environ['STORES_URL']}/{path.name}"


PEERS = {
    "mosaic": ("streaming", MosaicS3),
    "litdata": ("litdata", LitdataS3),
    "webdataset": ("webdataset", WebdatasetHttp),
}


if __name__ == "__main__":
    name = sys.argv[1]
    package, contestant = PEERS[name]
    __import__(package)
    serve({name: contestant()})

"""A bounded cache of remote shards on local disk, shared by the ranks of a node and by all jobs of a user.

    DIR/                     mode 0700, ours
      .lock                  the room: flock'd for the moments in which files are listed, made, renamed or removed
      SHA256.tar             a whole shard that hashed right; whoever reads it holds a shared flock on it
      SHA256.part            a shard on its way, of its full size from the start; its fetcher holds an exclusive flock on it
      PID-XXXX.wants         what a process will need next, in order, and the bytes that it waits for; flock'd while it lives

How a shard is published:

1. Within the room: the .part is made and flock'd. If another process has its flock, that one is fetching: wait, or take the next.
2. Still within the room: room is made (below), and the .part takes up its whole size, so that no one counts on that room.
3. Outside: the bytes are fetched into it, again and again if need be; their sha256 is read from the file; utime marks it as
   verified (mtime := VERIFIED_NS), fsync.
4. Within the room: rename to .tar, and the exclusive flock becomes the reader's shared one. Then fsync of DIR.

How room is made, within the room:

1. What lies in DIR is counted, .part files with it; if the new shard fits under the bound, that is all.
2. Candidates, in this order: .part files without a flock (their process is dead); shards that no process wants, the longest unused
   first; wanted ones, those needed last first, and only those that are needed later than the new one. `hold` needs it now.
3. A candidate with a flock on it is passed over. If what is left is enough, it goes, one by one; otherwise nothing does, and `hold`
   waits (its bytes stand in its .wants, and read-ahead leaves that room alone), while read-ahead stops until something changes.

Invariants. A file has its final name only if all of it hashed right. A flock ends with its process, so nobody cleans up after
somebody but under the flock. Read-ahead replaces a shard only by one needed sooner, so two readers cannot take turns in
evicting each other's. A `hold` reserves all it needs at once and keeps nothing while it waits, and what read-ahead keeps can be
evicted as soon as it is whole, so `hold` waits for nothing but downloads and readers.

A file is trusted while its size is the manifest's and its mtime is the mark: whoever writes to it moves its mtime, and then the
hash is read again. (Bits that the disk itself loses do not show.) Its atime is its last use, set by us.
"""

from pretrain.data.shard_cache.cache import Held, ShardCache

__all__ = ["Held", "ShardCache"]

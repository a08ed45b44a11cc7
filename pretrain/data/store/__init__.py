"""Copies of shards on a node's disk, shared by its ranks and by all jobs of a user.

Of remote shards as they are needed, within a bound (`data.cache_dir`, `data.cache_gb`); of whole
datasets before training begins (`data.stage_dir`; staging.py: fetch all, then wait), as long as the
disk has room to spare.

    DIR/                     mode 0700, ours
      .lock                  the room: flock'd for the moments in which files are listed, made, renamed or removed
      SHA256.tar             a whole shard that hashed right; SHA256.npy: an index
      SHA256.tar.part        a file on its way, of its full size from the start
      PID-XXXX.user          what a process reads, fetches, waits for, and will need next, in order; flock'd while it lives

How a file is published:

1. Within the room: if a process that lives fetches it, wait for that one, or take the next.
   Otherwise room is made (below), the .part takes up its whole size, so that no one counts on that
   room, and our .user names it.
2. Outside: its bytes are copied into the .part, from a server again and again if need be; their
   sha256 is read from the file; utime marks it as verified (mtime := VERIFIED_NS), fsync.
3. Within the room: rename to the final name. Then fsync of DIR.

How room is made, within the room:

1. What is in DIR is counted, .part files with it, or the disk is asked; if the new file fits, that
   is all.
2. Candidates, in this order: .part files that no process fetches (theirs is dead); files that no
   process wants, the longest unused first; wanted ones, those needed last first, and only those
   that are needed later than the new one. `hold` needs it now.
3. What a process reads is no candidate. If the rest is enough, it goes, one by one; otherwise
   nothing does, and `hold` waits (its bytes stand in its .user, and read-ahead leaves that room
   alone), while read-ahead looks again later.

Invariants. A file has its final name only if all of it hashed right. The flock of a .user ends with
its process, so nobody cleans up after somebody who lives. A .user takes its room on disk before it
is written over: on a full disk it keeps what it said last. Read-ahead replaces a shard only by one
needed sooner, so two readers cannot take turns in evicting each other's. A `hold` reserves all it
needs at once and keeps nothing while it waits, and what read-ahead keeps can be evicted as soon as
it is whole, so `hold` waits for nothing but downloads and readers. What is mapped stays readable
whatever happens.

A file is trusted while its size is the manifest's and its mtime is the mark: whoever writes to it
moves its mtime, and then the hash is read again. (Bits that the disk itself loses do not show.) Its
atime is its last use, set by us.
"""  # noqa: E501 (a table)

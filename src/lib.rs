//! `withlock LOCK -- COMMAND` runs COMMAND while a lock file exists, and removes that file afterwards only if it is
//! still its own. This page is the protocol; `withlock(5)` is the same for another program that wants to take part.
//!
//! # In short
//!
//! A lock is a file that exists. Whoever creates it holds the lock, writes one line about itself into it, and touches it
//! every third of the *ttl* that it has promised there. In the end it renames the file to a name that belongs to this one
//! file alone, and removes it. Whoever finds a file that was not touched for longer than its ttl may *end* it: by moving
//! it to that same name, which can be done once, and to no later file. Ending gives nobody the lock: all who want it
//! create the file anew, and one of them succeeds. As long as the holder or its command lives on this host, a kernel lock
//! on the file, the *guard*, forbids to end it however old it looks.
//!
//! Everything below is why each of these steps is as it is, and what goes wrong without it.
//!
//! # As a library
//!
//! The crate is a program. Its modules are public for its tests and its readers; they change as the program needs it, and
//! only the command line, the exit codes, the JSON of `inspect` and the files are kept stable. From another program run
//! `withlock` (`acquire --for-pid`, `check`, `inspect --json`), or follow `withlock(5)`. What is of use by itself is pure:
//! [`record`] reads what is in a lock, [`lease`] judges its age, [`exit`] has the meaning of the exit codes.
//!
//! ```
//! use withlock::record::{Content, classify};
//!
//! let line = concat!(
//!     r#"{"withlock":1,"nonce":"0f1e2d3c4b5a69788796a5b4c3d2e1f0","claimed_at_ms":1796036400000,"#,
//!     r#""ttl_ms":60000,"host":"web1","boot_id":"9f2c","pid":4242,"pid_started":1234567,"uid":0,"#,
//!     r#""command":"backup.sh","guard":"inherited","dev":65025}"#,
//! )
//! .as_bytes();
//! let Content::Record(record) = classify(line, line.len() as u64) else { panic!("not a record") };
//! assert_eq!((record.command.as_str(), record.ttl_ms), ("backup.sh", 60_000));
//! // An empty file is a lock whose maker is about to write, or died there; anything else is nobody's lock.
//! assert!(matches!(classify(b"", 0), Content::Blank));
//! assert!(matches!(classify(b"#!/bin/sh\n", 10), Content::Foreign));
//! ```
//!
//! # Limits
//!
//! * **On one host, on a local file system** a living holder keeps its lock whatever the clocks do, and ending a lock
//!   never hits the next one. Only `break --force` overrides that, and `--no-renew`, which gives the protection up.
//! * **Between hosts** that share files but not `flock(2)` the same holds as long as three things do: no process is
//!   held up for longer than the reclaim age (ttl + 5 s) between two neighbouring system calls, the server's clock
//!   makes no jump forward, and no look-up is answered from a stale cache (NFS: `noac,lookupcache=none`; FUSE: time-outs
//!   of zero, and files told apart by inode).
//! * A holder that is **suspended on another host** for longer than its ttl loses the lock while its command still
//!   exists. It learns so with its first act on waking. Until then only a fencing token keeps its late writes out.
//! * An ender that is **stopped while it has the guard** keeps everybody out until it is continued or killed;
//!   `break --force` passes it, if it has claimed already once that claim is older than the reclaim age.
//! * The guard lives as long as somebody keeps its descriptor. **Programs that close descriptors they do not know**
//!   (sudo, most daemons) drop it. Then the wrapper alone vouches for the lock, by its own copy and its renewals.
//! * A signal that somebody sends with kill(2) to the **whole process group** cannot be told from one sent to the
//!   wrapper: COMMAND gets it twice. Signals from the terminal can be told, and are not handed on.
//! * A descendant of COMMAND that has changed its user (setuid) **cannot be ended** by an ordinary user's wrapper; it is
//!   named on standard error.
//!
//! # Words
//!
//! *L* is the path of the lock. An *epoch* is one existence of a file at L, from its exclusive creation until it is
//! taken off that path; the process that created it is its *holder*. The *nonce*, 16 random bytes in the record, is the
//! epoch's identity. The *ttl* in the record is the holder's own promise: older than this without a renewal, and I am
//! dead. The *guard* is an exclusive `flock(2)` on the lock file's inode, held by the wrapper and, through an inherited
//! descriptor, by COMMAND and its children; the kernel drops it when the last of them is gone. The *slot* of an epoch is
//! the directory `L.stale-<claimed_at_ms>-<nonce>`: the one place where anybody but the punctual holder can end that
//! epoch, and afterwards the quarantine of its record.
//!
//! # The one arbiter
//!
//! Exclusive creation (`O_CREAT|O_EXCL`) decides everything: who is granted an epoch (the file L), who ends it (a claim
//! file in the slot), who gets a number (a marker in the directory of reserved numbers). The guard and the age look as
//! if they prevented collisions. They do not: the age says when an end may be *tried*, the guard can only *veto* it.
//!
//! Every numbered step below is one system call or a short fixed sequence of them, a process may stall or die between
//! any two, and L is always named by its base name under the descriptor of its directory, which is opened once. The
//! numbers are those in the comments of [`store`].
//!
//! # Grant
//!
//! 1. Note the boot clock, then create L exclusively. If it exists, look at it, and wait or end it; nothing else ever
//!    confers the lock.
//! 2. Take the guard without blocking. If it stays busy for 100 ms we stalled so long that somebody is ending our
//!    newborn epoch already: end it too, under the slot name of a blank lock, and start over. A file system without
//!    locks is lived with, and the record says `"guard":"none"`. With `--fence` the number is reserved here, so that a
//!    later epoch always has a larger one.
//! 3. fstat, which fixes device and inode as the epoch's identity and the name of its blank slot; then the record, in one
//!    write. A short write takes the epoch back and is an error. Off local file systems: fsync.
//! 4. L is still that inode, its blank slot is gone or *sealed*, its slot does not exist, and less than a third of the
//!    ttl has passed since (1), asked after the looks: now it is held. Otherwise renew first, and start over if that is
//!    not confirmed. Without this step a maker that slept between (1) and (3) would believe in a lock that was evicted
//!    as a blank one meanwhile. A maker without a guard takes it for these looks, on a local file system: an epoch that
//!    is ended for want of space, under the guard alone, has no slot in which that would be seen.
//!
//! **The seal.** An epoch whose maker stalls has two slots in its life: while it is blank one is named by inode and time
//! stamp, afterwards one is named by the nonce. Two enders could each win one of them, and the slower one's rename would
//! hit a successor. So whoever goes on under the later name first takes the place of `lock` in the earlier slot with a
//! directory, which no rename of a file replaces: the holder in step (4) here and in renew, an ender right after its
//! claim. If a file is there already, the epoch was ended there. Whoever is past the last look at the blank lock has made
//! its claim before the record was written, so it is enough to seal the slots that can be seen after that.
//!
//! # Renew
//!
//! Every third of the ttl, and at once after SIGCONT.
//!
//! 1. L still has our identity and our descriptor still shows our nonce, or the lock is **lost**.
//! 2. Touch the file through the descriptor made at the grant. By path we would refresh a successor.
//! 3. Look at L once more.
//! 4. Seal the blank slot, if there is one, and look for the slot. None: **confirmed**. One that can be removed with
//!    rmdir was empty: confirmed, and whoever was about to claim in it fails with ENOENT. One that holds a claim:
//!    **contested**, look again soon, unless that claim is older than the reclaim age, which means that its maker died.
//!    All that must have taken less than a third of the ttl, or what was seen is too old to prove anything.
//!
//! An ender judges the age again *after* it has made its claim. So one side touches and then looks for a claim, the
//! other claims and then looks at the touch; whatever the order, one of them sees the other. That is why a confirmed
//! renewal cannot be undone by an older time stamp.
//!
//! Off local file systems another machine has to answer every call, and may hang. A thread in such a call cannot even
//! look at a clock. So there renewals, the looks once a second and the release are errands of a second thread, whose
//! finds are news to the supervisor (`store::distant`): it ends COMMAND in time without them. And whoever waits, or only
//! asks, has an *attendant* ([`sys::attendant`]): a thread that sees that no call returns any more, lets signals act on
//! a waiter, and ends the process when its patience is over. Nobody who takes a lock on a local file system has either.
//!
//! # Release
//!
//! By the process that made the grant, and no other.
//!
//! 1. Identity and nonce as in renew, or the lock is lost. A holder without a guard takes it now, on a local file system,
//!    so that its slot is not reclaimed while it stalls.
//! 2. Rename L to the slot's *name*, as a plain file, replacing nothing. A delayed rival that still believes in this
//!    epoch renames towards the same name and fails on it. If a slot directory is there, somebody is ending the epoch:
//!    end it through the slot instead, with the descriptor and the guard we have.
//! 3. Unlock the guard explicitly: a background child may still have the descriptor, and waiters sleep on it.
//! 4. Look at what was renamed, and unlink it if it is ours. Somebody who asks no lock may have put another file at L
//!    since (1); that goes back, and the lock was lost.
//!
//! "Compare the nonce, then unlink L" would remove a successor's lock whenever the process stalls between the two.
//!
//! # End through the slot
//!
//! Eviction of a stale lock, `break`, a release that found somebody in its slot, `release --nonce`.
//!
//! 1. Who may not rename L (sticky directory, somebody else's file) stops and makes nothing. Open L, read from this very
//!    descriptor that it is the inode and nonce that were judged, and take its guard without blocking. If that stays busy
//!    a process vouches for the epoch: **vetoed**, however old it is. `--force` goes on without the guard.
//! 2. Make the slot directory, with the permissions of the directory that holds L. It may exist.
//! 3. Open it, and use only this descriptor from here on. On a local file system take a shared flock on it: nobody
//!    reclaims a slot in which somebody acts, however long they stall.
//! 4. Create `claim-<k>` in it exclusively: 0, or one above the highest. A claim that is there may be passed over at once
//!    by whoever has the guard of a local file system, since no other ender can be alive then; by others when it is
//!    older than the reclaim age. If the create fails with EEXIST or ENOENT somebody else is faster: look again. Then
//!    seal the slots that this epoch had while it was blank, or blank with an earlier stamp.
//! 5. L is still this inode and nonce and, for an eviction or an unforced break, still stale, by comparing its time stamp
//!    with that of the claim just made: two stamps of one file system, no host's clock. If not, withdraw the claim.
//! 6. `renameat2(L, slot/lock, RENAME_NOREPLACE)`. It cannot hit another epoch: nobody else may end this one any more; if
//!    the slot has gone the call fails; if somebody was faster its target is taken.
//!
//! *Ending never grants*: the evictor goes back to the exclusive create like everybody else. An attempt must issue its
//! rename within the claim deadline, min(ttl, 5 s) counted from a look taken with the guard in hand, or look again.
//! Where the file system refuses RENAME_NOREPLACE that bound alone protects a plain rename. Without an inode or space
//! for a slot, the holder of a local guard renames L to the slot's name as a plain file. If the slot's name is occupied
//! by something that is no slot, a local guard decides alone and L goes to `L.reclaim-<random>`; without that guard
//! nothing decides, so nobody ends the epoch, not by force either.
//!
//! # Reclaim
//!
//! The occupied name of an ended epoch is a mechanism: it is what a delayed rival fails on. So a slot may go only if the
//! epoch at L is another, nobody has the guard of the quarantined file, on a local file system nobody is in the slot (an
//! exclusive flock on it can be had), and the slot is older, by its own stamp against that of a file made just now, than
//! max(ttl, claim deadline) + 5 s. The time in its *name* is older by the
//! owner's whole life and says nothing. The 5 s are needed because the deadline bounds when a rename is issued, not when
//! it lands ([`lease::RECLAIM_MARGIN_MS`]). The slot is renamed to a private name first, then deleted. A contender that
//! has evicted reclaims this lock's aged slots in passing, so that a crash loop does not fill the directory.
//!
//! # Stale, and whose clock
//!
//! Stale means: the file's age is greater than the ttl *in its record*. No pid, host or boot id is compared, and a
//! contender's own `--ttl` is about its own lock. A first look may use the local clock; the verdict of step (5) does not.
//! A time stamp in the future proves nothing, so a lock whose inode, nonce and stamp stayed the same for one ttl of the
//! observer's boot clock is stale too. File systems that stamp whole seconds get 2 s more. A **blank** lock (empty, NUL
//! bytes, or the beginning of a record, at most 4096 bytes) is held while it is younger than 60 s, whoever looks.
//! Everything else at L is **foreign** and never touched. `--evict-dead` is the one exception a contender can ask for:
//! the guard that the record calls inherited is free, under the same boot, on a local file system, so nobody who kept
//! the descriptor lives.
//!
//! # By nonce
//!
//! Who has nothing but a nonce (`renew`, `release`, after `acquire`) is not the process that made the grant and never
//! renames L itself: between its look and that rename L could become another's, and it has no guard to prevent that.
//! It renews as above through a descriptor whose record it has read, and releases through the slot like any ender.
//! `acquire` alone leaves a lock without a guard, good for one ttl; with `--for-pid` a keeper process has the guard,
//! renews, and releases when the process it watches (by a pidfd, so that a reused number does not fool it) has ended.
//!
//! # Numbers
//!
//! `reserve DIR` creates `DIR/claim-<n>` exclusively, n from one above `DIR/floor`, upward until a create succeeds. It
//! tries for `DIR/lock` first and goes on without it when its patience ends; both ways call the one function. A wait
//! that runs out *means* that a rival is about to claim, so the lock must not be what keeps numbers apart. It protects
//! only the floor, a hint that saves looking: written under the lock alone, by rename, never lowered. Markers are never
//! removed. A fencing token is such a number, taken between the steps (2) and (3) of the grant.
//!
//! # Waiting
//!
//! A waiter sleeps in a blocking `flock` on the holder's inode where the record says that there is a guard and was
//! written under this boot; release and death wake it in the kernel's order. A second thread looks at L about once a
//! second and at the expiry, and calls the sleeper only when there is something to do: who leaves the kernel's queue for
//! a mere look wakes all behind. Given the guard while L is still that inode, the waiter knows that the holder is dead
//! but not yet stale: it lets go at once, so as to veto nobody, and waits by the clock. It never sleeps on a lock without
//! a record, since it would turn the maker away. Where no guard can be seen it polls, at a pace that grows from
//! milliseconds to a second. Being woken confers nothing; it creates L like everybody.
//!
//! Whoever is given a guard whose epoch has ended keeps it while it holds the lock: those who sleep behind it came before
//! all who find the new epoch. So that a release knows which of its guards somebody waits for, a waiter notes itself on
//! the file by a shared record lock of its open description, on local file systems. The oldest guard that is slept on is
//! let go first, and the holder's own only when L is there again or after ten short looks. None of this decides anything:
//! a wrong note costs a late or a needless waking, the create alone grants.
//!
//! # Several locks
//!
//! `--also` takes all of several locks or none. **Nothing is held while something is waited for**: whoever finds one busy
//! gives back what it has, sleeps on that one as above, then tries that one first and the others by no-wait attempts. So
//! no order is needed against deadlock, and none is relied on: one by device and inode would differ between hosts, one by
//! path between spellings. Those who want the same ones try them in the same order, which keeps them apart, and pause for
//! a random moment after setbacks. Two names of one lock are found by directory and name or, where these do not show it,
//! by the nonce: what we were just granted is not another's. Each lock is an epoch of its own, with its own guard, renewed
//! together, released one by one; all must count at one moment before the command is started. A fence is reserved last.
//!
//! # Many hosts
//!
//! A LOCK `etcd://HOST:PORT[,HOST:PORT…]/KEY` is the same lock where hosts share no files (cargo feature `etcd`). The
//! key is the lock; its creation is the one arbiter here too.
//!
//! * Grant: a lease, then a transaction "the create revision of KEY is 0 → put the record under the lease". It counts
//!   if less than a third of the ttl has passed since the lease was asked for, else after a renewal. The create revision
//!   is the fencing token. A request that got no answer may have been carried out: every attempt offers the same nonce
//!   under the same lease, so that the next one finds its own. A signal in the middle revokes the lease first.
//! * Renew: keep the lease alive, then look that the key is still ours. **Confirmed** counts from when the keep-alive
//!   was *sent*; etcd counts from some later moment. **Lost** is what was found: no lease, no key, another key.
//! * Release: a transaction "the create revision is still ours → delete KEY", then revoke the lease.
//! * End, by an operator only: "the create revision is still the observed one → delete KEY and put the record under
//!   `KEY.stale-<claimed_at_ms>-<nonce>`", for the reclaim age. Ending never grants.
//! * Wait: a watch from the revision that was seen. The waiter keeps its lease, so that a lock that becomes free is one
//!   transaction away.
//!
//! There is no guard, and nobody is asked whether a holder lives: a holder that cannot renew ends its command while its
//! lease still runs. All requests are made in threads of their own; [`store::Held`] tells what they learn through a
//! descriptor, so that no signal and no end of COMMAND ever waits for the network.
//!
//! # Map
//!
//! Arrows run one way: `command` → [`supervise`] → [`store`] → [`sys`]. The pure modules know no system call; clock
//! readings are their arguments.
//!
//! | module | what it holds |
//! |---|---|
//! | [`address`] | a LOCK that names a key in etcd (pure) |
//! | [`cli`], [`options`], [`plain`] | what was typed; what it means, validated; the same for common lines at once (pure) |
//! | [`exit`] | the table of exit codes (pure) |
//! | [`record`] | the record, slot and claim names: encode, decode, classify (pure) |
//! | [`lease`] | stale? renew when? give up when? reclaim when? (pure) |
//! | [`machine`] | the supervisor's decisions: (state, event) → actions (pure) |
//! | [`report`], [`text`] | words for people (pure) |
//! | [`store`] | the seam, and the protocol on files: `file` grants and waits, `held` renews and releases, `distant` does so where calls may hang, `end` and `claim`, `handed` (by nonce), `reclaim`, `reserve`, `several` (all or none), `look` (reads and judges, touches nothing), `permission` (who may do what, for people) |
//! | [`supervise`] | poll → event → machine → perform |
//! | [`sys`] | the only home of `nix` and `unsafe`; [`sys::hook`] is the tests' hold on every system call |
//! | `command` | one page for each command |

pub mod address;
pub mod cli;
mod command;
pub mod exit;
pub mod lease;
pub mod machine;
pub mod options;
pub mod plain;
pub mod record;
pub mod report;
pub mod store;
pub mod supervise;
pub mod sys;
pub mod text;

pub use command::{early, main};

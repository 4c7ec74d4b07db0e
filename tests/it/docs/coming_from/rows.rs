//! The table.

use super::claims;
use super::facts::{AfterKill, Busy, Facts};

pub(super) struct Row {
    /// The program that is found on the left.
    pub(super) tool: &'static str,
    pub(super) theirs: &'static str,
    pub(super) ours: &'static str,
    pub(super) run: Run,
    /// What else differs.
    pub(super) claims: &'static [Claim],
}

/// How a row is tested, besides its claims.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    /// Both sides are run, and behave so.
    Both { theirs: Facts, ours: Facts },
    /// By its claims alone.
    ByClaims,
    /// Both sides, on an etcd: whoever comes second waits, and this is their status where COMMAND's is 7.
    InEtcd { status: u8 },
    /// Their side cannot be run here.
    NotHere,
}

/// A sentence of a row, and what shows it.
pub(super) struct Claim {
    pub(super) says: &'static str,
    pub(super) shown: fn(&Row),
}

const fn claim(says: &'static str, shown: fn(&Row)) -> Claim {
    Claim { says, shown }
}

const fn both(theirs: Facts, ours: Facts) -> Run {
    Run::Both { theirs, ours }
}

/// A kernel lock on a file that stays.
const fn kernel(busy: Busy) -> Facts {
    let after_kill = if let Busy::Exits(_) = busy { Some(AfterKill::Free) } else { None };
    Facts { status: 7, busy, leaves_file: true, after_kill }
}

/// A file that is the lock.
const fn file(status: u8, busy: Busy) -> Facts {
    Facts { status, busy, leaves_file: false, after_kill: None }
}

/// Ours.
const fn ours(busy: Busy) -> Facts {
    let after_kill = if let Busy::Exits(_) = busy { Some(AfterKill::Stale) } else { None };
    Facts { status: 7, busy, leaves_file: false, after_kill }
}

/// Of a region of a script the last status is that of the release.
const REGION: Facts = Facts { status: 0, busy: Busy::Waits, leaves_file: false, after_kill: None };

use Busy::{Exits, Waits};

pub(super) const ROWS: &[Row] = &[
    Row {
        tool: "flock",
        theirs: "flock LOCK COMMAND",
        ours: "withlock LOCK -- COMMAND",
        run: both(kernel(Waits), ours(Waits)),
        claims: &[claim(
            "A background child of COMMAND does not keep the lock; with flock it does, but for -o.",
            claims::background_child,
        )],
    },
    Row {
        tool: "flock",
        theirs: "flock -n LOCK COMMAND",
        ours: "withlock -n LOCK -- COMMAND",
        run: both(kernel(Exits(1)), ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "flock",
        theirs: "flock -w 1 LOCK COMMAND",
        ours: "withlock -w 1 LOCK -- COMMAND",
        run: both(kernel(Exits(1)), ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "flock",
        theirs: "flock -n -E 9 LOCK COMMAND",
        ours: "withlock -n -E 9 LOCK -- COMMAND",
        run: both(kernel(Exits(9)), ours(Exits(9))),
        claims: &[],
    },
    Row {
        tool: "flock",
        theirs: "flock LOCK -c 'TEXT'",
        ours: "withlock LOCK -c 'TEXT'",
        run: both(kernel(Waits), ours(Waits)),
        claims: &[claim("TEXT is for sh, not for $SHELL.", claims::shell)],
    },
    Row {
        tool: "flock",
        theirs: "flock DIRECTORY COMMAND",
        ours: "withlock DIRECTORY/lock -- COMMAND",
        run: Run::ByClaims,
        claims: &[claim("A directory, a script or data is no lock: 73.", claims::only_locks)],
    },
    Row {
        tool: "flock",
        theirs: "exec 9>LOCK; flock 9; COMMAND; flock -u 9",
        ours: "nonce=$(withlock acquire --for-pid $$ LOCK) && COMMAND; withlock release --nonce \"$nonce\" LOCK",
        run: both(Facts { leaves_file: true, ..REGION }, REGION),
        claims: &[claim("The lock goes with the shell, whoever else has its descriptors.", claims::region)],
    },
    Row {
        tool: "flock",
        theirs: "[ \"$LOCKED\" ] || exec env LOCKED=1 flock -n \"$0\" \"$0\" \"$@\"",
        ours: "withlock check LOCK 2>/dev/null || exec withlock -n LOCK -- \"$0\" \"$@\"",
        run: Run::ByClaims,
        claims: &[claim(
            "Busy is 75, not 1. A variable that is left over from elsewhere lets nobody in.",
            claims::whole_script,
        )],
    },
    Row {
        tool: "dotlockfile",
        theirs: "dotlockfile -P -r -1 -i 1 LOCK COMMAND",
        ours: "withlock LOCK -- COMMAND",
        run: both(file(7, Waits), ours(Waits)),
        claims: &[claim(
            "A lock of dotlockfile's is stale after five minutes; with -p it is valid while any process has its number.",
            claims::dotlockfile_stale,
        )],
    },
    Row {
        tool: "dotlockfile",
        theirs: "dotlockfile -r 0 LOCK COMMAND",
        ours: "withlock -n LOCK -- COMMAND",
        run: both(file(0, Exits(4)), ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "dotlockfile",
        theirs: "dotlockfile -l -p -r -1 -i 1 LOCK && COMMAND; dotlockfile -u LOCK",
        ours: "nonce=$(withlock acquire --for-pid $$ LOCK) && COMMAND; withlock release --nonce \"$nonce\" LOCK",
        run: both(REGION, REGION),
        claims: &[claim(
            "dotlockfile -u removes anybody's lock, withlock release only its own.",
            claims::release_of_anybody,
        )],
    },
    Row {
        tool: "lockfile",
        theirs: "lockfile -1 LOCK && { COMMAND; rm -f LOCK; }",
        ours: "withlock LOCK -- COMMAND",
        run: both(file(0, Waits), ours(Waits)),
        claims: &[],
    },
    Row {
        tool: "lockfile",
        theirs: "lockfile -r 0 LOCK && { COMMAND; rm -f LOCK; }",
        ours: "withlock -n LOCK -- COMMAND",
        run: both(Facts { after_kill: Some(AfterKill::Stuck), ..file(0, Exits(73)) }, ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "lockfile",
        theirs: "lockfile -1 -l 3600 LOCK && { COMMAND; rm -f LOCK; }",
        ours: "withlock LOCK -- COMMAND",
        run: both(file(0, Waits), ours(Waits)),
        claims: &[claim(
            "With -l a lock of that age is removed though its holder lives; here its holder keeps it.",
            claims::lockfile_robs,
        )],
    },
    Row {
        tool: "setlock",
        theirs: "setlock LOCK COMMAND",
        ours: "withlock LOCK -- COMMAND",
        run: both(kernel(Waits), ours(Waits)),
        claims: &[],
    },
    Row {
        tool: "setlock",
        theirs: "setlock -n LOCK COMMAND",
        ours: "withlock -n LOCK -- COMMAND",
        run: both(kernel(Exits(111)), ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "setlock",
        theirs: "setlock -nx LOCK COMMAND",
        ours: "withlock -n --on-busy skip LOCK -- COMMAND",
        run: both(kernel(Exits(0)), ours(Exits(0))),
        claims: &[claim("A lock that can never be taken is still an error, 73.", claims::missing_directory)],
    },
    Row {
        tool: "chpst",
        theirs: "chpst -l LOCK COMMAND",
        ours: "withlock LOCK -- COMMAND",
        run: both(kernel(Waits), ours(Waits)),
        claims: &[],
    },
    Row {
        tool: "chpst",
        theirs: "chpst -L LOCK COMMAND",
        ours: "withlock -n LOCK -- COMMAND",
        run: both(kernel(Exits(111)), ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "lckdo",
        theirs: "lckdo LOCK COMMAND",
        ours: "withlock -n LOCK -- COMMAND",
        run: both(kernel(Exits(75)), ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "lckdo",
        theirs: "lckdo -w LOCK COMMAND",
        ours: "withlock LOCK -- COMMAND",
        run: both(kernel(Waits), ours(Waits)),
        claims: &[],
    },
    Row {
        tool: "lckdo",
        theirs: "lckdo -W 1 LOCK COMMAND",
        ours: "withlock -w 1 LOCK -- COMMAND",
        run: both(kernel(Exits(75)), ours(Exits(75))),
        claims: &[],
    },
    Row {
        tool: "etcdctl",
        theirs: "etcdctl lock NAME COMMAND",
        ours: "withlock etcd://HOST/NAME -- COMMAND",
        run: Run::InEtcd { status: 1 },
        claims: &[],
    },
    Row {
        tool: "consul",
        theirs: "consul lock PREFIX COMMAND",
        ours: "withlock etcd://HOST/PREFIX -- COMMAND",
        run: Run::NotHere,
        claims: &[claim("An etcd in place of Consul. Not run: Debian has no consul.", claims::not_here)],
    },
    Row {
        tool: "consul",
        theirs: "consul lock -try 15s PREFIX COMMAND",
        ours: "withlock -w 15s etcd://HOST/PREFIX -- COMMAND",
        run: Run::NotHere,
        claims: &[claim("Busy is 75. Not run either.", claims::not_here)],
    },
];

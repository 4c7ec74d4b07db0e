//! The exit codes: one table for the program, the man page and the README (a test holds them equal).

/// Why `withlock` ends with a status of its own, rather than with COMMAND's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// The command line makes no sense.
    Usage = 64,
    /// The lock service (etcd) cannot be reached.
    Unreachable = 69,
    /// The system refused something other than the lock: fork, a descriptor, a signal mask.
    System = 71,
    /// The lock can never be taken at this path.
    CannotTake = 73,
    /// Input or output error, no space; or COMMAND succeeded and the release failed.
    Io = 74,
    /// Held by another, or the wait ran out.
    Held = 75,
    /// The lock was lost while COMMAND ran.
    Lost = 76,
    /// No permission.
    NotPermitted = 77,
    /// Held by an ancestor of this process.
    Nested = 78,
    /// `inspect --quiet` only: the lock is stale.
    Stale = 79,
    /// `--max-hold` was reached.
    MaxHold = 124,
    /// COMMAND cannot be executed.
    NotExecutable = 126,
    /// COMMAND was not found.
    NotFound = 127,
}

impl Exit {
    /// The number given to the operating system.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// One row of the table of exit codes.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The code, or `None` for COMMAND's own status.
    pub exit: Option<Exit>,
    /// What it means, in one phrase.
    pub meaning: &'static str,
}

/// The table of exit codes, in the order in which people read it.
pub const TABLE: &[Row] = &[
    Row { exit: None, meaning: "COMMAND's own status; 128+N if signal N ended it" },
    Row { exit: Some(Exit::Usage), meaning: "usage error; nothing was created or run" },
    Row { exit: Some(Exit::Unreachable), meaning: "the lock service cannot be reached" },
    Row { exit: Some(Exit::System), meaning: "the system refused something else (fork, descriptors)" },
    Row {
        exit: Some(Exit::CannotTake),
        meaning: "LOCK can never be taken here: no such directory, foreign, name too long, read-only",
    },
    Row {
        exit: Some(Exit::Io),
        meaning: "input/output error, no space; also: COMMAND succeeded but the release failed",
    },
    Row { exit: Some(Exit::Held), meaning: "held by another, or the wait ran out" },
    Row { exit: Some(Exit::Lost), meaning: "the lock was lost while COMMAND ran" },
    Row {
        exit: Some(Exit::NotPermitted),
        meaning: "no permission; also: COMMAND succeeded but the lock may not be released",
    },
    Row { exit: Some(Exit::Nested), meaning: "held by an ancestor of this process" },
    Row { exit: Some(Exit::Stale), meaning: "inspect --quiet only: the lock is stale" },
    Row { exit: Some(Exit::MaxHold), meaning: "--max-hold was reached" },
    Row { exit: Some(Exit::NotExecutable), meaning: "COMMAND cannot be executed" },
    Row { exit: Some(Exit::NotFound), meaning: "COMMAND was not found" },
];

/// The status a shell would report for a command ended by `signal`.
pub const fn of_signal(signal: i32) -> u8 {
    // Linux signal numbers are 1 to 64: the low byte is all of it.
    128u8.wrapping_add(signal.to_le_bytes()[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_stands_in_the_table_once_and_the_table_is_sorted() {
        let codes: Vec<u8> = TABLE.iter().filter_map(|row| row.exit).map(Exit::code).collect();
        let mut sorted = codes.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(codes, sorted);
        assert_eq!(codes, [64, 69, 71, 73, 74, 75, 76, 77, 78, 79, 124, 126, 127]);
    }

    #[test]
    fn a_signal_is_reported_as_a_shell_does() {
        assert_eq!([of_signal(2), of_signal(9), of_signal(15), of_signal(64)], [130, 137, 143, 192]);
    }
}

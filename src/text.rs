//! Text for people: bytes that are not ours are shown so that they cannot drive a terminal, and times
//! so that they can be read at night.

use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter, Write};
use std::os::unix::ffi::OsStrExt;

/// Shows foreign bytes: control characters and bytes that are not UTF-8 as `\xNN`, a backslash doubled,
/// so that what is printed can be read back without loss.
pub struct Shown<'a>(pub &'a [u8]);

impl<'a> Shown<'a> {
    /// Shows a path or another string of the operating system.
    pub fn os(text: &'a (impl AsRef<OsStr> + ?Sized)) -> Self {
        Shown(text.as_ref().as_bytes())
    }
}

impl Display for Shown<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '\\' => out.write_str("\\\\")?,
                    // Bidirectional controls can make a terminal show one name as another.
                    c if c.is_control()
                        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
                    {
                        let mut utf8 = [0; 4];
                        for byte in c.encode_utf8(&mut utf8).bytes() {
                            write!(out, "\\x{byte:02x}")?;
                        }
                    }
                    c => out.write_char(c)?,
                }
            }
            for byte in chunk.invalid() {
                write!(out, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

/// A word that a shell reads back as exactly these bytes: bare where that is safe, `'…'` where it is
/// not, `$'…'` where a terminal would otherwise be driven by it.
pub fn shell_word(bytes: &[u8]) -> String {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(b);
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return String::from_utf8_lossy(bytes).into_owned();
    }
    let printable = std::str::from_utf8(bytes).is_ok_and(|text| Shown(bytes).to_string() == text.replace('\\', "\\\\"));
    let mut word = String::from(if printable { "'" } else { "$'" });
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\'' if printable => word.push_str("'\\''"),
                '\'' => word.push_str("\\'"),
                c if printable => word.push(c),
                c => {
                    let _ = write!(word, "{}", Shown(c.encode_utf8(&mut [0; 4]).as_bytes()));
                }
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(word, "\\x{byte:02x}");
        }
    }
    word.push('\'');
    word
}

/// A length of time in the two largest units that matter: `450ms`, `1.5s`, `2m 5s`, `3h 12m`, `4d 1h`.
pub fn duration(ms: u64) -> String {
    let (seconds, rest_ms) = (ms / 1000, ms % 1000);
    match seconds {
        0 => format!("{rest_ms}ms"),
        1..10 if rest_ms >= 100 => format!("{seconds}.{}s", rest_ms / 100),
        1..60 => format!("{seconds}s"),
        60..3600 => pair(seconds / 60, "m", seconds % 60, "s"),
        3600..86_400 => pair(seconds / 3600, "h", seconds % 3600 / 60, "m"),
        _ => pair(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

fn pair(major: u64, major_unit: &str, minor: u64, minor_unit: &str) -> String {
    if minor == 0 { format!("{major}{major_unit}") } else { format!("{major}{major_unit} {minor}{minor_unit}") }
}

/// A point in time, UTC to the second: `2026-03-01T02:03:04Z`; out of the calendar's range as `@<ms>`.
pub fn time(ms_since_epoch: i64) -> String {
    let since = u64::try_from(ms_since_epoch).ok().map(std::time::Duration::from_millis);
    match since.and_then(|d| std::time::UNIX_EPOCH.checked_add(d)) {
        // humantime knows the years up to 9999 and panics beyond.
        Some(when) if ms_since_epoch < 253_402_300_800_000 => humantime::format_rfc3339_seconds(when).to_string(),
        _ => format!("@{ms_since_epoch}ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_bytes_cannot_drive_a_terminal() {
        assert_eq!(Shown(b"a\x1b[31m\n\xffb\\").to_string(), "a\\x1b[31m\\x0a\\xffb\\\\");
        assert_eq!(Shown("na\u{ef}ve \u{202e}".as_bytes()).to_string(), "na\u{ef}ve \\xe2\\x80\\xae");
    }

    #[test]
    fn a_shell_word_is_bare_only_where_that_is_safe() {
        assert_eq!(shell_word(b"/var/lock/a.lock"), "/var/lock/a.lock");
        assert_eq!(shell_word(b""), "''");
        assert_eq!(shell_word(b"a b'c"), "'a b'\\''c'");
        assert_eq!(shell_word(b"a\\b"), "'a\\b'");
        assert_eq!(shell_word(b"a\n'\xff"), "$'a\\x0a\\'\\xff'");
    }

    #[test]
    fn lengths_of_time_are_short() {
        let shown: Vec<String> =
            [0, 450, 1000, 1500, 12_900, 125_000, 120_000, 11_520_000, 349_200_000].map(duration).into();
        assert_eq!(shown, ["0ms", "450ms", "1s", "1.5s", "12s", "2m 5s", "2m", "3h 12m", "4d 1h"]);
    }

    #[test]
    fn no_time_is_too_far_to_be_shown() {
        assert_eq!(time(0), "1970-01-01T00:00:00Z");
        for far in [i64::MIN, -1, 253_402_300_800_000, i64::MAX] {
            assert_eq!(time(far), format!("@{far}ms"));
        }
    }
}

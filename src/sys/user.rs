//! User names. From /etc/passwd, read here: a static program must not load the C library's own lookup
//! modules, and a lookup over the network must not hold a message up.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The user's name from /etc/passwd.
pub fn local_name(uid: u32) -> Option<String> {
    let passwd = std::fs::read("/etc/passwd").ok()?;
    find_in(&passwd, uid)
}

/// How long the system's other sources are waited for, in milliseconds: a directory server that does not
/// answer must not keep anybody from looking at a lock.
const PATIENCE_MS: u16 = 500;

/// The user's name from /etc/passwd, or else from the system's other sources by way of getent(1).
pub fn name(uid: u32) -> Option<String> {
    local_name(uid).or_else(|| ask_getent(uid))
}

fn ask_getent(uid: u32) -> Option<String> {
    let mut asked = Command::new("getent")
        .args(["passwd", &uid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut answer = Vec::new();
    if let Some(mut out) = asked.stdout.take() {
        let mut ready = [PollFd::new(out.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::from(PATIENCE_MS)).is_ok_and(|count| count > 0) {
            // One line, written at once.
            let mut line = [0; 1024];
            answer = out.read(&mut line).map(|length| line[..length].to_vec()).unwrap_or_default();
        }
    }
    let _ = asked.kill();
    let _ = asked.wait();
    find_in(&answer, uid)
}

fn find_in(passwd: &[u8], uid: u32) -> Option<String> {
    let uid = uid.to_string();
    passwd.split(|b| *b == b'\n').find_map(|line| {
        let mut fields = line.split(|b| *b == b':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.as_bytes()).then(|| String::from_utf8_lossy(name).into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_by_its_exact_number() {
        let passwd = b"root:x:0:0::/root:/bin/sh\nbad line\na:x:100:1::/:\nb:x:10:1::/:\n";
        assert_eq!(find_in(passwd, 10).as_deref(), Some("b"));
        assert_eq!(find_in(passwd, 100).as_deref(), Some("a"));
        assert_eq!(find_in(passwd, 1), None);
    }
}

//! Interactive shells with job control, each in a terminal of its own.

use super::pty::Terminal;
use super::run::{Run, Running};
use super::sandbox::Sandbox;
use super::{children, eventually};

const PROMPT: &str = "ready> ";

/// A shell, and the test as the person who types.
pub(crate) struct Shell {
    name: &'static str,
    pub(crate) terminal: Terminal,
    pub(crate) running: Running,
}

impl Shell {
    /// The shells that people use here.
    pub(crate) const ALL: [fn(&Sandbox) -> Shell; 3] = [Self::bash, Self::dash, Self::zsh];

    fn start(name: &'static str, run: Run<'_>) -> Shell {
        let (mut terminal, running) = Terminal::start(run.env("PS1", PROMPT).env("TERM", "dumb").env("ENV", ""));
        terminal.expect(PROMPT);
        Shell { name, terminal, running }
    }

    pub(crate) fn bash(sandbox: &Sandbox) -> Shell {
        Self::start("bash", sandbox.program("bash").args(["--norc", "--noprofile", "-i"]))
    }

    pub(crate) fn dash(sandbox: &Sandbox) -> Shell {
        Self::start("dash", sandbox.program("dash").args(["-i", "-m"]))
    }

    pub(crate) fn zsh(sandbox: &Sandbox) -> Shell {
        // Without its line editor: what is typed and what is shown is the same as in the others.
        Self::start("zsh", sandbox.program("zsh").args(["-f", "-i", "+o", "zle", "+o", "promptsp"]))
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Types a line.
    pub(crate) fn types_line(&mut self, line: &str) {
        self.terminal.types(&format!("{line}\n"));
    }

    /// Waits for the prompt.
    #[track_caller]
    pub(crate) fn prompts(&mut self) {
        self.terminal.expect(PROMPT);
    }

    /// Waits for the prompt, and asks for the status of what ended.
    #[track_caller]
    pub(crate) fn prompts_with_status(&mut self, status: u8) {
        self.prompts();
        self.types_line("echo \"status=$?.\"");
        self.terminal.expect("\nstatus=");
        self.terminal.expect_next(&format!("{status}."));
        self.prompts();
    }

    /// The wrapper: the shell's child.
    #[track_caller]
    pub(crate) fn job(&self) -> i32 {
        eventually("the job runs", || {
            let found = children(self.running.pid());
            found.iter().find(|process| process.name == "withlock").map(|process| process.pid).ok_or(found)
        })
    }

    pub(crate) fn leave(mut self) {
        self.types_line("exit 0");
        self.running.wait();
    }
}

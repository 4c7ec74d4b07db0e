//! A lock file for commands. (Long form: see below, once the modules stand.)

pub mod cli;
mod command;
pub mod exit;
pub mod lease;
pub mod machine;
pub mod options;
pub mod record;
pub mod report;
pub mod store;
pub mod supervise;
pub mod sys;
pub mod text;

pub use command::{early, main};

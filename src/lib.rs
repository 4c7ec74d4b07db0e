//! x
pub mod exit;pub mod text;pub mod lease;pub mod record;pub mod cli;

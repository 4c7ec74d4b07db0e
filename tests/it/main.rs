//! The program as a whole, run for real: one binary, so that everything links once.

mod cases_clock;
mod cases_command;
mod cases_end;
mod cases_path;
mod cases_signals;
mod cases_terminal;
mod cases_waiting;
mod contention;
mod cron;
mod frugal;
mod harness;
mod harness_works;
mod killed_holder;
mod surroundings;
mod token_endpoint;
mod two_hosts;

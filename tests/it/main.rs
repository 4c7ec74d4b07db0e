//! The program as a whole, run for real: one binary, so that everything links once.

mod cases_clock;
mod cases_end;
mod cases_path;
mod contention;
mod cron;
mod harness;
mod killed_holder;
mod token_endpoint;

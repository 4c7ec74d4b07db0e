//! The program as a whole, run for real: one binary, so that everything links once.

mod also;
mod both_stores;
mod budget;
mod cases_clock;
mod cases_command;
mod cases_end;
mod cases_path;
mod cases_signals;
mod cases_terminal;
mod cases_waiting;
mod contention;
mod cron;
mod docs;
#[cfg(feature = "etcd")]
mod etcd_access;
#[cfg(feature = "etcd")]
mod etcd_contention;
#[cfg(feature = "etcd")]
mod etcd_operators;
#[cfg(feature = "etcd")]
mod etcd_partition;
#[cfg(feature = "etcd")]
mod etcd_peers;
#[cfg(feature = "etcd")]
mod etcd_run;
mod evict_dead;
mod explorer;
mod frugal;
mod harness;
mod harness_works;
mod hostile;
mod injected;
mod killed_holder;
mod log;
mod ops_break;
mod ops_check;
mod ops_inspect;
mod ops_look;
mod ops_permission;
mod ops_race;
mod ops_reclaim;
mod recruit;
mod reserve_arbiter;
mod reserve_cost;
mod reserve_fence;
mod reserve_numbers;
mod scripts_acquire;
mod scripts_contention;
mod scripts_examples;
mod scripts_keeper;
mod scripts_skip;
mod shells;
mod stepped_clock;
mod strangers_locks;
mod surroundings;
mod swapped;
mod token_endpoint;
mod two_hosts;

//! The C entry point. The program has no Rust runtime before its first statement: that would open
//! closed standard descriptors, change the disposition of SIGPIPE and install a fault handler, all of
//! which COMMAND would see, and cost a tenth of the start-up time.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};

// SAFETY: this is the one definition of `main` in the program, with the signature that C expects.
#[unsafe(no_mangle)]
extern "C" fn main(_count: c_int, _arguments: *const *const c_char) -> c_int {
    c_int::from(withlock::main())
}

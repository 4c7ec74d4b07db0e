//! What the early start of the program leaves to its ordinary one, in the same process.

use std::any::Any;
use std::sync::atomic::{AtomicPtr, Ordering};

static LEFT: AtomicPtr<Box<dyn Any>> = AtomicPtr::new(std::ptr::null_mut());

/// Leaves a value.
pub fn leave(value: Box<dyn Any>) {
    LEFT.store(Box::into_raw(Box::new(value)), Ordering::Release);
}

/// Takes what was left, once.
pub fn take() -> Option<Box<dyn Any>> {
    let left = LEFT.swap(std::ptr::null_mut(), Ordering::Acquire);
    if left.is_null() {
        return None;
    }
    // SAFETY: it came from Box::into_raw in `leave`, and the swap gave it to us alone.
    Some(*unsafe { Box::from_raw(left) })
}

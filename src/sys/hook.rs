//! The tests' hold on the protocol: a hook before every system call, and switches that leave one step
//! out. Only in builds with the `switches` feature; otherwise everything here is empty.

/// A step of the protocol that a negative control can leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// Exclusive creation of the lock file: the arbiter of the grant.
    Exclusive,
    /// The holder's flock on the new file.
    Guard,
    /// The ender's flock, and its veto.
    Veto,
    /// Verification after the claim: still this epoch, still stale.
    Verify,
    /// A holder's look at its slot when it renews.
    SlotCheck,
    /// The look at both slots before a grant counts.
    GrantCheck,
    /// Release by rename to the slot (left out: by unlink).
    ReleaseBySlot,
    /// Exclusive creation of the claim file in a slot.
    Claim,
    /// RENAME_NOREPLACE on the ender's rename.
    Noreplace,
    /// A reclaimer's look at the guard of the quarantined file.
    ReclaimGuard,
    /// A reclaimer's look whether the epoch at the lock path is the slot's.
    ReclaimLive,
    /// The reclaim age (left out: every slot is old enough).
    ReclaimAge,
    /// Identity and nonce before a release or a renewal.
    Identity,
    /// Renewal through the descriptor made at the grant (left out: by path).
    Descriptor,
    /// A waiter does not take the guard of a newborn lock.
    Newborn,
    /// Exclusive creation of a reserved number's marker.
    Mark,
}

/// All steps, with the names used in `WITHLOCK_LEAVE_OUT`.
pub const STEPS: &[(Step, &str)] = &[
    (Step::Exclusive, "exclusive"),
    (Step::Guard, "guard"),
    (Step::Veto, "veto"),
    (Step::Verify, "verify"),
    (Step::SlotCheck, "slot-check"),
    (Step::GrantCheck, "grant-check"),
    (Step::ReleaseBySlot, "release-by-slot"),
    (Step::Claim, "claim"),
    (Step::Noreplace, "noreplace"),
    (Step::ReclaimGuard, "reclaim-guard"),
    (Step::ReclaimLive, "reclaim-live"),
    (Step::ReclaimAge, "reclaim-age"),
    (Step::Identity, "identity"),
    (Step::Descriptor, "descriptor"),
    (Step::Newborn, "newborn"),
    (Step::Mark, "mark"),
];

#[cfg(not(feature = "switches"))]
mod off {
    use std::ffi::OsStr;

    use nix::Result;

    use super::Step;

    #[inline(always)]
    pub(crate) fn before(_call: &'static str, _name: &OsStr) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn left_out(_step: Step) -> bool {
        false
    }

    #[inline(always)]
    pub(crate) fn boot_offset_ms() -> u64 {
        0
    }

    #[inline(always)]
    pub(crate) fn is_scheduled() -> bool {
        false
    }
}

#[cfg(feature = "switches")]
mod on {
    use std::cell::{Cell, RefCell};
    use std::ffi::OsStr;
    use std::mem::ManuallyDrop;
    use std::sync::OnceLock;

    use nix::Result;

    use super::{STEPS, Step};

    type Hook = Box<dyn FnMut(&'static str, &OsStr) -> Result<()>>;

    thread_local! {
        // Without a destructor: registering one needs the C library's start.
        static HOOK: ManuallyDrop<RefCell<Option<Hook>>> = const { ManuallyDrop::new(RefCell::new(None)) };
        static LEFT_OUT: Cell<u32> = const { Cell::new(0) };
        static BOOT_OFFSET_MS: Cell<u64> = const { Cell::new(0) };
    }

    /// Sets this thread's hook: called before every system call of the protocol, with the call's name
    /// and the file name it is about. It may wait, fail the call, or unwind (the thread "dies").
    pub fn set(hook: impl FnMut(&'static str, &OsStr) -> Result<()> + 'static) {
        HOOK.with(|cell| *cell.borrow_mut() = Some(Box::new(hook)));
    }

    /// Takes this thread's hook away.
    pub fn clear() {
        HOOK.with(|cell| *cell.borrow_mut() = None);
    }

    /// Leaves steps out, in this thread only.
    pub fn leave_out(steps: &[Step]) {
        LEFT_OUT.with(|cell| cell.set(steps.iter().fold(0, |bits, step| bits | bit(*step))));
    }

    /// Moves this thread's boot clock forward.
    pub fn advance_boot_clock(by_ms: u64) {
        BOOT_OFFSET_MS.with(|cell| cell.set(cell.get() + by_ms));
    }

    const fn bit(step: Step) -> u32 {
        1 << step as u8
    }

    fn from_environment() -> u32 {
        static BITS: OnceLock<u32> = OnceLock::new();
        *BITS.get_or_init(|| {
            let named = crate::sys::process::variable("WITHLOCK_LEAVE_OUT").unwrap_or_default();
            let named = named.to_string_lossy();
            let bit_of = |name: &str| STEPS.iter().find(|(_, known)| *known == name).map_or(0, |(step, _)| bit(*step));
            named.split(',').fold(0, |bits, name| bits | bit_of(name))
        })
    }

    pub(crate) fn before(call: &'static str, name: &OsStr) -> Result<()> {
        // Taken out while it runs, so that a hook may itself look at files.
        let Some(mut hook) = HOOK.with(|cell| cell.borrow_mut().take()) else { return Ok(()) };
        let verdict = hook(call, name);
        HOOK.with(|cell| *cell.borrow_mut() = Some(hook));
        verdict
    }

    /// Whether this step is left out.
    pub fn left_out(step: Step) -> bool {
        (LEFT_OUT.with(Cell::get) | from_environment()) & bit(step) != 0
    }

    pub(crate) fn boot_offset_ms() -> u64 {
        BOOT_OFFSET_MS.with(Cell::get)
    }

    pub(crate) fn is_scheduled() -> bool {
        HOOK.with(|cell| cell.borrow().is_some())
    }
}

#[cfg(not(feature = "switches"))]
pub(crate) use off::{before, boot_offset_ms, is_scheduled, left_out};
#[cfg(feature = "switches")]
pub use on::{advance_boot_clock, clear, leave_out, left_out, set};
#[cfg(feature = "switches")]
pub(crate) use on::{before, boot_offset_ms, is_scheduled};

//! System calls without the C library: for code that has no errno of its own to put a result in, since
//! its thread was made without the C library's knowledge or runs before the C library was started.

/// A system call of up to six arguments; a result of -4095 to -1 is a negated errno.
///
/// # Safety
///
/// As for the system call.
#[cfg(target_arch = "x86_64")]
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel's calling convention; the caller vouches for the rest.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number => result, in("rdi") arguments[0],
            in("rsi") arguments[1], in("rdx") arguments[2], in("r10") arguments[3], in("r8") arguments[4],
            in("r9") arguments[5], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// A system call of up to six arguments; a result of -4095 to -1 is a negated errno.
///
/// # Safety
///
/// As for the system call.
#[cfg(target_arch = "aarch64")]
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel's calling convention; the caller vouches for the rest.
    unsafe {
        std::arch::asm!("svc 0", in("x8") number, inlateout("x0") arguments[0] => result,
            in("x1") arguments[1], in("x2") arguments[2], in("x3") arguments[3], in("x4") arguments[4],
            in("x5") arguments[5], options(nostack));
    }
    result
}

/// A system call of up to six arguments; a result of -4095 to -1 is a negated errno.
///
/// # Safety
///
/// As for the system call.
#[cfg(target_arch = "riscv64")]
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel's calling convention; the caller vouches for the rest.
    unsafe {
        std::arch::asm!("ecall", in("a7") number, inlateout("a0") arguments[0] => result,
            in("a1") arguments[1], in("a2") arguments[2], in("a3") arguments[3], in("a4") arguments[4],
            in("a5") arguments[5], options(nostack));
    }
    result
}

//! The program's entry points.
//!
//! There is no Rust runtime before the first statement: it would open closed standard descriptors, change
//! the disposition of SIGPIPE and install a fault handler, all of which COMMAND would see.
//!
//! And where the build asks for it (`early_start`: a static x86-64 program), there is not even a C
//! runtime before the common case. The C library's start-up executes some thirty CPUID instructions to
//! choose among its string functions. On a virtual machine each of them traps to the hypervisor, 10 to
//! 25 microseconds apiece: a quarter of the whole run of `withlock L -- true`. So the process begins at
//! `withlock_start`, which makes thread-local storage and runs [`withlock::early`]: an uncontended lock
//! and a short command. Whatever else there is to do is done behind the C library's own start, to which
//! the process goes on as if nothing had been before.
//!
//! What may run early: Rust code and thin system call wrappers. What may not: the C library's functions
//! that it selects at start-up (calls to them go through addresses that are not set yet). Those among
//! them that compiled Rust code calls on its own are defined here instead, for both phases.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};

// SAFETY: this is the one definition of `main` in the program, with the signature that C expects.
#[unsafe(no_mangle)]
extern "C" fn main(count: c_int, arguments: *const *const c_char) -> c_int {
    // SAFETY: C hands `main` this many valid strings, which live as long as the process.
    let words = unsafe { withlock::sys::process::words(count, arguments) };
    c_int::from(withlock::main(&words))
}

#[cfg(early_start)]
mod early {
    use std::ffi::{c_char, c_int, c_void};

    // The kernel enters here with the stack at argc. r12 keeps it over the call; a call wants the stack
    // aligned to 16. rdx is zero for `_start`: there is no dynamic linker whose exit function it could be.
    std::arch::global_asm!(
        ".globl withlock_start",
        ".type withlock_start,@function",
        "withlock_start:",
        "xor ebp, ebp",
        "mov r12, rsp",
        "mov rdi, rsp",
        "and rsp, -16",
        "call {early}",
        "mov rsp, r12",
        "xor edx, edx",
        "jmp _start",
        early = sym start,
    );

    // String functions that need no selection at start-up. The direction flag is clear on entry and on
    // return, as everywhere.
    std::arch::global_asm!(
        ".macro function name",
        ".globl \\name",
        ".type \\name,@function",
        "\\name:",
        ".endm",
        "function memcpy",
        "mov rax, rdi",
        "mov rcx, rdx",
        "rep movsb",
        "ret",
        "function memmove",
        "mov rax, rdi",
        "mov rcx, rdx",
        "mov r8, rdi",
        "sub r8, rsi",
        "cmp r8, rdx", // The target begins inside the source: from the end.
        "jb 2f",
        "rep movsb",
        "ret",
        "2: lea rdi, [rdi + rdx - 1]",
        "lea rsi, [rsi + rdx - 1]",
        "std",
        "rep movsb",
        "cld",
        "ret",
        "function memset",
        "mov r8, rdi",
        "mov eax, esi",
        "mov rcx, rdx",
        "rep stosb",
        "mov rax, r8",
        "ret",
        "function memcmp",
        "function bcmp",
        "xor eax, eax",
        "mov rcx, rdx",
        "cmp rcx, rcx", // Equal, should there be nothing to compare.
        "repe cmpsb",
        "je 3f",
        "movzx eax, byte ptr [rdi - 1]",
        "movzx ecx, byte ptr [rsi - 1]",
        "sub eax, ecx",
        "3: ret",
        "function strlen",
        "mov rcx, -1",
        "xor eax, eax",
        "repne scasb",
        "not rcx",
        "lea rax, [rcx - 1]",
        "ret",
        "function memchr",
        "mov eax, esi",
        "mov rcx, rdx",
        "or edx, 1", // Not equal, should there be nothing to search.
        "repne scasb",
        "lea rdi, [rdi - 1]",
        "mov eax, 0",
        "cmove rax, rdi",
        "ret",
        "function memrchr",
        "mov eax, esi",
        "mov rcx, rdx",
        "lea rdi, [rdi + rdx - 1]",
        "or edx, 1",
        "std",
        "repne scasb",
        "cld",
        "lea rdi, [rdi + 1]",
        "mov eax, 0",
        "cmove rax, rdi",
        "ret",
        ".purgem function",
    );

    const STORAGE_BYTES: usize = 4096;

    /// Thread-local storage below, the thread's control block above, as the x86-64 ABI wants them.
    #[repr(C, align(64))]
    struct Storage([u8; STORAGE_BYTES], [u8; STORAGE_BYTES]);

    static mut STORAGE: Storage = Storage([0; STORAGE_BYTES], [0; STORAGE_BYTES]);

    #[repr(C)]
    struct FileHeader {
        identification: [u8; 16],
        kind_and_machine: [u16; 2],
        version: u32,
        entry: u64,
        program_headers_offset: u64,
        section_headers_offset: u64,
        flags: u32,
        header_bytes: u16,
        program_header_bytes: u16,
        program_header_count: u16,
    }

    #[repr(C)]
    struct ProgramHeader {
        kind: u32,
        flags: u32,
        offset: u64,
        address: u64,
        physical_address: u64,
        file_bytes: u64,
        memory_bytes: u64,
        alignment_bytes: u64,
    }

    const PT_TLS: u32 = 7;
    const ARCH_SET_FS: usize = 0x1002;
    const SYS_ARCH_PRCTL: usize = 158;
    const SYS_EXIT_GROUP: usize = 231;

    // SAFETY: the linker defines the first, the C library the second (environ(7)), as declared here.
    unsafe extern "C" {
        static __ehdr_start: FileHeader;
        static mut environ: *const *const c_char;
    }

    /// A system call, before there is an errno to put its result in.
    ///
    /// # Safety
    /// The arguments must be what this system call takes.
    unsafe fn call(number: usize, first: usize, second: usize) -> usize {
        let result;
        // SAFETY: the kernel's calling convention; the caller vouches for the arguments.
        unsafe {
            std::arch::asm!("syscall", inlateout("rax") number => result, in("rdi") first, in("rsi") second,
                out("rcx") _, out("r11") _, options(nostack));
        }
        result
    }

    /// Makes thread-local storage: errno lives there, and what the allocator keeps for a thread. The C
    /// library's start makes its own later and forgets this one.
    ///
    /// # Safety
    /// Once, before anything else, in the only thread.
    unsafe fn make_thread_local_storage() -> bool {
        // SAFETY: single-threaded, before anything else; the linker provides the header, and the program
        // headers lie where it says.
        unsafe {
            let header = &raw const __ehdr_start;
            let offset = usize::try_from((*header).program_headers_offset).unwrap_or(0);
            let headers = header.byte_add(offset).cast::<ProgramHeader>();
            let block = (&raw mut STORAGE).cast::<u8>().add(STORAGE_BYTES);
            for index in 0..usize::from((*header).program_header_count) {
                let segment = &*headers.add(index);
                if segment.kind != PT_TLS {
                    continue;
                }
                let alignment = usize::try_from(segment.alignment_bytes).unwrap_or(usize::MAX).max(1);
                let memory_bytes = usize::try_from(segment.memory_bytes).unwrap_or(usize::MAX);
                if alignment > 64 || memory_bytes > STORAGE_BYTES - alignment {
                    return false;
                }
                let image = std::ptr::with_exposed_provenance::<u8>(usize::try_from(segment.address).unwrap_or(0));
                let target = block.sub(memory_bytes.next_multiple_of(alignment));
                target.copy_from_nonoverlapping(image, usize::try_from(segment.file_bytes).unwrap_or(0));
            }
            // The control block's first and third words are its own address.
            let words = block.cast::<*mut c_void>();
            words.write(block.cast());
            words.add(2).write(block.cast());
            call(SYS_ARCH_PRCTL, ARCH_SET_FS, block.addr()) == 0
        }
    }

    /// The first Rust code of the process.
    ///
    /// # Safety
    /// Called by `withlock_start` alone, with the stack pointer that the kernel gave the process.
    unsafe extern "C" fn start(stack: *const usize) {
        // SAFETY: the kernel puts argc, the arguments, a null pointer and the environment here.
        unsafe {
            if !make_thread_local_storage() {
                return;
            }
            let count = *stack;
            let arguments = stack.add(1).cast::<*const c_char>();
            environ = arguments.add(count + 1);
            let words = withlock::sys::process::words(c_int::try_from(count).unwrap_or(0), arguments);
            if let Some(code) = withlock::early(&words) {
                call(SYS_EXIT_GROUP, usize::from(code), 0);
            }
            // The allocator goes on from where it is; with its thread-local storage made anew it would
            // else take this thread for a second one and give it a second heap.
            nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1);
        }
    }
}

//! What two parties can do with each other, and what is said where they cannot.

use std::time::{Duration, Instant};

use kvx_core::transfer::Mode;

use crate::party::{BORROWED, Party, Program, SHARED, Start};

/// Starts two parties, or says why they cannot be.
pub(crate) fn two(test: &str, one: Start<'_>, other: Start<'_>) -> Option<[Party; 2]> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: {test} needs root, to become another user or enter namespaces");
        return None;
    }
    let program = Program::new();
    match (program.start(test, one), program.start(test, other)) {
        (Ok(one), Ok(other)) => Some([one, other]),
        (Err(why), _) | (_, Err(why)) => {
            eprintln!("skipped: {test}: {why}");
            None
        }
    }
}

/// Shared memory is moved both ways, in both modes, and arrives.
pub(crate) fn shared_memory_works(one: &mut Party, other: &mut Party) {
    one.ask("fill 1").unwrap();
    other.ask("fill 2").unwrap();
    assert_eq!(one.go(Mode::Read, SHARED, SHARED).as_deref(), Ok("mapped"));
    assert_eq!(one.ask("holds 0 2").as_deref(), Ok("true"));
    one.ask("fill 1").unwrap();
    assert_eq!(one.go(Mode::Write, SHARED, BORROWED).as_deref(), Ok("mapped"));
    assert_eq!(other.ask("holds 1 1").as_deref(), Ok("true"));
    assert_eq!(other.go(Mode::Read, BORROWED, SHARED).as_deref(), Ok("mapped"));
    assert_eq!(other.go(Mode::Write, SHARED, SHARED).as_deref(), Ok("mapped"));
}

/// Memory of `hidden` that `reader` may not read is refused soon, with these words and the remedy, whoever starts.
pub(crate) fn borrowed_memory_is_refused(reader: &mut Party, hidden: &mut Party, words: &[&str]) {
    let begun = Instant::now();
    let read = reader.go(Mode::Read, BORROWED, BORROWED).unwrap_err();
    for word in words.iter().chain(&["unsupported: ", "allocate the memory with kvx"]) {
        assert!(read.contains(word), "{word}: {read}");
    }
    // The reader carries this out, and says only that it may not.
    let written = hidden.go(Mode::Write, BORROWED, BORROWED).unwrap_err();
    for word in
        ["unsupported: ", "borrowed memory", "CAP_SYS_PTRACE", "allocate the memory with kvx"]
    {
        assert!(written.contains(word), "{word}: {written}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

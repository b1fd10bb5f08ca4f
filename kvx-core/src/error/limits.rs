//! Limits of the operating system that people can raise.

/// What to do where the operating system refused something with this error number, because of a limit that can be raised. `None`
/// of all other numbers, and on systems whose numbers are not known here.
///
/// # Examples
///
/// ```
/// # #[cfg(any(target_os = "linux", target_os = "macos"))]
/// assert!(kvx_core::limit_remedy(24).unwrap().contains("ulimit -n"));
/// assert_eq!(kvx_core::limit_remedy(0), None);
/// ```
#[must_use]
pub const fn limit_remedy(number: i32) -> Option<&'static str> {
    // EMFILE, ENFILE and EFBIG have the same numbers on both: errno(3), and Apple's sys/errno.h.
    if !cfg!(any(target_os = "linux", target_os = "macos")) {
        return None;
    }
    match number {
        24 => Some("let this process have more descriptors: ulimit -n"),
        23 => Some("let the system have more descriptors: sysctl fs.file-max"),
        27 => Some(
            "let this process have larger files, which memory with a descriptor counts as: ulimit -f",
        ),
        _ => None,
    }
}

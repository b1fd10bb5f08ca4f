use super::*;

#[test]
fn display_is_one_line_with_everything_in_it() {
    let error = Error::new(ErrorKind::Resources, "register", "cannot pin memory")
        .with_backend("verbs")
        .with_native(12)
        .with_context("bytes", 4096)
        .with_context("limit", "64 KiB")
        .with_remedy("raise RLIMIT_MEMLOCK");
    assert_eq!(
        error.to_string(),
        "register: cannot pin memory [backend verbs, code 12] (bytes=4096, limit=64 KiB); raise RLIMIT_MEMLOCK"
    );
    assert_eq!(error.kind(), ErrorKind::Resources);
    assert_eq!(error.retry(), Retry::Never);
}

#[test]
fn what_a_message_has_in_another_errors_words_is_not_said_twice() {
    let inner =
        Error::peer("peers.want", "not met").with_context("peer", 0).with_remedy("look there");
    let outer = Error::peer("peers.want", inner.to_string()).with_remedy("look there");
    assert_eq!(outer.to_string(), inner.to_string());
    assert_eq!(inner.again().with_context("peer", 0).to_string(), inner.to_string());
    assert_eq!(inner.again().with_context("peer", 1).context().len(), 2);
    // Only what is the same.
    let other = Error::peer("peers", inner.to_string()).with_remedy("look here");
    assert_eq!(other.to_string(), "peers: peers.want: not met (peer=0); look there; look here");
}

#[test]
fn a_mismatch_names_the_field_and_both_values() {
    let error = Error::mismatch("plan.compile", "dtype", "bf16", "fp8_e4m3");
    assert_eq!(error.to_string(), "plan.compile: dtype: producer has bf16, consumer has fp8_e4m3");
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!(mismatch.field, "dtype");
    assert_eq!(mismatch.left.1, "bf16");
    assert_eq!(mismatch.right.1, "fp8_e4m3");
}

#[test]
fn the_source_is_kept() {
    let io = std::io::Error::from_raw_os_error(2);
    let error = Error::new(ErrorKind::Fabric, "open", "no device").with_source(io);
    assert!(std::error::Error::source(&error).is_some());
}

/// Known failure of this project's own: a listener without descriptors was told to choose another port.
#[cfg(any(target_os = "linux", target_os = "macos"))]
#[test]
fn where_a_limit_is_the_cause_the_remedy_is_to_raise_it() {
    let io = || std::io::Error::from_raw_os_error(24);
    let error = Error::config("control", "cannot listen").with_remedy("choose another port");
    assert_eq!(error.remedy(), Some("choose another port"));
    let error = error.with_source(io());
    assert!(error.to_string().ends_with("; let this process have more descriptors: ulimit -n"));
    let outer = Error::peer("demo", "it ended").with_remedy("look there").with_source(error);
    assert!(outer.remedy().unwrap().contains("ulimit -n"), "{outer}");
    // Who hears of it again hears the same.
    assert_eq!(outer.again().to_string(), outer.to_string());
    assert_eq!(outer.again().in_full(), outer.in_full());
    let other = Error::peer("demo", "it ended")
        .with_remedy("look")
        .with_source(std::io::Error::from_raw_os_error(2));
    assert_eq!(other.remedy(), Some("look"));
}

#[test]
fn causes_are_said_in_order_and_none_twice() {
    let io = || std::io::Error::other("no\nluck");
    let inner = Error::config("trace", "unreadable").with_source(io());
    let outer = Error::peer("demo", "it ended").with_remedy("look there").with_source(inner);
    assert_eq!(outer.in_full(), "demo: it ended; look there: trace: unreadable: no luck");
    let said = Error::config("trace", format!("unreadable: {}", io())).with_source(io());
    assert_eq!(said.in_full(), "trace: unreadable: no luck");
}

#[test]
fn an_error_is_one_word_wide() {
    assert_eq!(size_of::<Error>(), size_of::<usize>());
    assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
}

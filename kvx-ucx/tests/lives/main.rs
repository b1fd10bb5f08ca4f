//! Many transfers, connections and deaths leave nothing behind; what is required, chosen or unknown is refused by name; and two
//! network namespaces. With the library that `KVX_UCX_LIB` names. With `KVX_LONG=1` ten times as many.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test without a harness is no test to clippy"
)]

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod count;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod deaths;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod many;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod network;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod pair;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod peer;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod refusals;

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn main() -> std::process::ExitCode {
    use kvx_core::registry::Probe;
    use libtest_mimic::{Arguments, Completion, Failed, Trial};

    if let Some(code) = peer::serve_if_asked() {
        return code;
    }
    let missing = match (kvx_ucx::REGISTRATION.probe)(&kvx_core::config::BackendConfig::new()) {
        Probe::Unavailable { reason, remedy } => {
            Some(format!("{reason}; {}", remedy.unwrap_or_default()))
        }
        _ => None,
    };
    let required =
        std::env::var("KVX_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name == "ucx"));
    let mut arguments = Arguments::from_args();
    // What is left is counted for the whole process.
    arguments.test_threads = Some(1);
    let listed = arguments.list || arguments.ignored;
    let tests: [(&str, fn()); 13] = [
        // First: UCX 1.20 and later keep the routes that they find at the first connection of the process.
        ("two_namespaces_of_both_families", network::two_namespaces_of_both_families),
        ("an_interface_that_leads_nowhere", network::an_interface_that_leads_nowhere),
        ("transfers_leave_nothing_behind", many::transfers_leave_nothing_behind),
        ("no_data_travels_in_messages", many::no_data_travels_in_messages),
        ("connections_leave_nothing_behind", many::connections_leave_nothing_behind),
        ("an_idle_pair_sleeps", many::an_idle_pair_sleeps),
        ("notifications_wait_for_room", many::notifications_wait_for_room),
        ("the_raw_loop_moves_what_it_says", many::the_raw_loop_moves_what_it_says),
        ("killed_peers", deaths::killed_peers),
        ("stopped_peers", deaths::stopped_peers),
        ("what_is_required_is_enforced", refusals::what_is_required_is_enforced),
        (
            "unknown_settings_and_devices_are_refused",
            refusals::unknown_settings_and_devices_are_refused,
        ),
        ("another_library_is_refused", refusals::another_library_is_refused),
    ];
    let trials = tests.into_iter().map(|(name, test)| match missing.clone() {
        Some(reason) if required => Trial::test(name, move || {
            Err(Failed::from(format!("KVX_REQUIRE names ucx, but: {reason}")))
        }),
        Some(reason) => Trial::ignorable_test(name, move || Ok(Completion::ignored_with(&reason)))
            .with_ignored_flag(listed),
        None => Trial::ignorable_test(name, move || {
            test();
            Ok(pair::skipped().map_or(Completion::Completed, Completion::ignored_with))
        }),
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn main() {}

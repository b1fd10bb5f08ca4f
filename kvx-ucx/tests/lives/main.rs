//! Many transfers, connections and deaths leave nothing behind; what is required, chosen or unknown is refused by name; and two
//! network namespaces. With the library that `KVX_UCX_LIB` names. With `KVX_LONG=1` ten times as many.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test without a harness is no test to clippy"
)]

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod absent;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod again;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod carriers;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod count;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod deaths;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod many;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod memory;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod mixed;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod network;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod owners;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod pair;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod parting;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod peer;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod refusals;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod rows;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
#[path = "../conformance/subject.rs"]
mod subject;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod told;

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn main() -> std::process::ExitCode {
    use kvx_core::registry::Probe;
    use libtest_mimic::{Arguments, Completion, Failed, Trial};

    if let Some(code) = peer::serve_if_asked().or_else(absent::kit_if_asked) {
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
    let tests: &[(&str, fn())] = &[
        ("two_namespaces_over_ipv4", network::two_namespaces_over_ipv4),
        ("two_namespaces_over_ipv6", network::two_namespaces_over_ipv6),
        ("what_is_said_to_carry_the_data_does", carriers::what_is_said_to_carry_the_data_does),
        ("cma_that_carries_nothing_is_refused", carriers::cma_that_carries_nothing_is_refused),
        ("an_interface_that_leads_nowhere", network::an_interface_that_leads_nowhere),
        (
            "an_interface_that_only_the_peer_reaches",
            network::an_interface_that_only_the_peer_reaches,
        ),
        (
            "a_peer_that_does_not_reach_this_side_lives",
            network::a_peer_that_does_not_reach_this_side_lives,
        ),
        ("an_interface_that_is_of_no_use", network::an_interface_that_is_of_no_use),
        (
            "a_first_connection_that_fails_is_not_the_last",
            again::a_first_connection_that_fails_is_not_the_last,
        ),
        (
            "a_peer_that_starts_again_at_its_address_is_met",
            again::a_peer_that_starts_again_at_its_address_is_met,
        ),
        (
            "a_region_of_several_registrations_is_whole",
            rows::a_region_of_several_registrations_is_whole,
        ),
        (
            "a_backend_opens_beside_much_registered_memory",
            rows::a_backend_opens_beside_much_registered_memory,
        ),
        ("transfers_leave_nothing_behind", many::transfers_leave_nothing_behind),
        ("no_data_travels_in_messages", many::no_data_travels_in_messages),
        ("connections_leave_nothing_behind", many::connections_leave_nothing_behind),
        (
            "peers_give_back_what_they_took_over_tcp",
            memory::peers_give_back_what_they_took_over_tcp,
        ),
        (
            "peers_give_back_what_they_took_over_cma",
            memory::peers_give_back_what_they_took_over_cma,
        ),
        ("an_idle_pair_sleeps", many::an_idle_pair_sleeps),
        ("notifications_wait_for_room", many::notifications_wait_for_room),
        ("the_raw_loop_moves_what_it_says", many::the_raw_loop_moves_what_it_says),
        ("killed_peers_over_tcp", deaths::killed_peers_over_tcp),
        ("stopped_peers_over_tcp", deaths::stopped_peers_over_tcp),
        ("killed_peers_over_cma", deaths::killed_peers_over_cma),
        ("stopped_peers_over_cma", deaths::stopped_peers_over_cma),
        ("killed_peers_over_shared_memory", deaths::killed_peers_over_shared_memory),
        ("stopped_peers_over_shared_memory", deaths::stopped_peers_over_shared_memory),
        ("owners_outlive_readers", owners::owners_outlive_readers),
        ("owners_outlive_writers", owners::owners_outlive_writers),
        ("stopped_owners_outlive_readers", owners::stopped_owners_outlive_readers),
        ("stopped_owners_outlive_writers", owners::stopped_owners_outlive_writers),
        ("owners_sever_readers", owners::owners_sever_readers),
        ("owners_sever_writers", owners::owners_sever_writers),
        ("owners_outlive_a_cut_from_readers", owners::owners_outlive_a_cut_from_readers),
        ("owners_outlive_a_cut_from_writers", owners::owners_outlive_a_cut_from_writers),
        ("versions_that_differ_over_tcp", mixed::versions_that_differ_over_tcp),
        ("versions_that_differ_over_cma", mixed::versions_that_differ_over_cma),
        (
            "whoever_is_severed_is_told_and_met_again",
            parting::whoever_is_severed_is_told_and_met_again,
        ),
        ("one_too_many_of_anything_is_found", count::one_too_many_of_anything_is_found),
        ("what_is_required_is_enforced", refusals::what_is_required_is_enforced),
        (
            "unknown_settings_and_devices_are_refused",
            refusals::unknown_settings_and_devices_are_refused,
        ),
        ("settings_that_ucx_cannot_do_are_named", refusals::settings_that_ucx_cannot_do_are_named),
        (
            "wrong_settings_are_seen_however_little_is_logged",
            refusals::wrong_settings_are_seen_however_little_is_logged,
        ),
        ("what_would_end_the_process_is_refused", refusals::what_would_end_the_process_is_refused),
        ("too_few_descriptors_are_counted", refusals::too_few_descriptors_are_counted),
        ("what_no_transport_can_do_is_said", refusals::what_no_transport_can_do_is_said),
        ("what_an_error_says_is_not_logged_too", told::what_an_error_says_is_not_logged_too),
        ("a_library_that_is_cut_off_is_refused", absent::a_library_that_is_cut_off_is_refused),
        ("another_library_is_refused", refusals::another_library_is_refused),
    ];
    let trials = tests.iter().copied().map(|(name, test)| match missing.clone() {
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
    // This one needs none.
    let absent = Trial::test(absent::TEST, || {
        absent::an_absent_library_is_a_reason_or_a_failure();
        Ok(())
    });
    libtest_mimic::run(&arguments, trials.chain([absent]).collect()).exit_code()
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn main() {}

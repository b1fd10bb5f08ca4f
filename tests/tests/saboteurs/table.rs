//! All saboteurs, by name.

use std::sync::Arc;

use crate::being::{
    BurnsProcessor, CapabilitiesChange, CapabilitiesContradict, Descriptor, LeaksDescriptor,
    LeaksMemory, LeaksThread, TransportUnknown,
};
use crate::blocking::{Blocks, Call};
use crate::ending::{Cancel, Cancels, Close, Closes, Revoked, Revokes, Sever, Severs};
use crate::flow::{
    DoneAndSettled, ErrorButPosted, Full, IdsCut, LostAmongThreads, MeetingLosesEvents,
    NeedsTheInitiator, NeedsTheTarget, OnlyForTheirPoster, Overfills, SettledNever, SettledTwice,
    ToEveryPoller, WhenFull,
};
use crate::meeting::{
    ConnectsToNobody, CrossingMakesTwo, FinishGivesAnother, FirstHandle, Read, Reads,
    RepeatedOffer, SameIncarnation, WaitsForFinish,
};
use crate::notes::{
    BareNotDelivered, DoneAtOnce, EventsLost, NotifiedBeforeData, NotifiedThoughCancelled,
    NotifiedToWrongPeer, NotifiedTwice, Received, Sent, Told,
};
use crate::outcome::{ClosingFails, Fails, LateAnswer};
use crate::wrapper::Sabotage;
use crate::{data, memory, notes};

/// One saboteur.
pub(crate) struct Saboteur {
    pub(crate) name: &'static str,
    /// The setup on which it is found out.
    pub(crate) setup: &'static str,
    pub(crate) make: fn() -> Arc<dyn Sabotage>,
}

macro_rules! saboteurs {
    ($($setup:literal: { $($name:ident => $make:expr,)* })*) => {
        pub(crate) static SABOTEURS: &[Saboteur] = &[$($(
            Saboteur { name: stringify!($name), setup: $setup, make: || Arc::new($make) },
        )*)*];
    };
}

saboteurs! {
    "rc": {
        last_byte_missing => data::Changed(data::last_byte_missing),
        one_byte_too_many => data::Changed(data::one_byte_too_many),
        second_segment_off_by_one => data::Changed(data::second_segment_off_by_one),
        segments_swapped => data::Changed(data::segments_swapped),
        offsets_aligned_down => data::Changed(data::offsets_aligned_down),
        wraps_at_a_mebibyte => data::Changed(data::wraps_at_a_mebibyte),
        read_as_write => data::ReadAsWrite,
        settled_before_data => data::SettledBeforeData::default(),
        done_before_data => data::SettledBeforeData::at_once(),
        posts_reversed => data::PostsReversed::default(),
        wrong_peer => data::WrongPeer::default(),

        page_begins_a_byte_early => data::Changed(data::page_begins_a_byte_early),
        third_region_dropped => data::Changed(data::third_region_dropped),
        seventeenth_region_lost => data::Changed(data::seventeenth_region_lost),
        offsets_of_24_bits => data::Changed(data::offsets_of_24_bits),
        offsets_of_32_bits => data::Changed(data::offsets_of_32_bits),
        local_offsets_of_32_bits => data::Changed(data::local_offsets_of_32_bits),
        cut_at_four_mebibytes => data::Changed(data::cut_at_four_mebibytes),
        merged_where_local_touches => data::Changed(data::merged_where_local_touches),
        merged_where_remote_touches => data::Changed(data::merged_where_remote_touches),
        merged_in_threes => data::Changed(data::merged_in_threes),

        notified_before_data => NotifiedBeforeData::always(),
        notified_before_many_segments => NotifiedBeforeData::of_many_segments(),
        notified_before_much_data => NotifiedBeforeData::of_much_data(),
        empty_beside_data_lost => Sent(notes::empty_beside_data_lost),
        longest_beside_data_cut => Sent(notes::longest_beside_data_cut),
        long_beside_a_read_cut => Sent(notes::long_beside_a_read_cut),
        notified_twice => NotifiedTwice::default(),
        notified_never => Received::dropped(),
        notification_altered => Received::default(),
        notified_to_wrong_peer => NotifiedToWrongPeer::default(),
        bare_refused => Sent(notes::bare_refused),
        bare_not_delivered => BareNotDelivered::default(),
        longest_notification_cut => Sent(notes::longest_cut),
        oversize_cut => Sent(notes::oversize_cut),
        inline_not_notified => Sent(notes::inline_not_notified),
        done_and_never_notified => DoneAtOnce::new(Told::Never),
        done_and_notified_at_the_next_poll => DoneAtOnce::new(Told::AtTheNextPoll),
        done_and_notified_twice => DoneAtOnce::new(Told::Twice),
        events_lost_in_small_buffer => EventsLost,
        notified_though_cancelled => NotifiedThoughCancelled::default(),

        failures_called_misuse => Fails::called_misuse(),
        failures_called_cancelled => Fails::called_cancelled(),
        late_answer_settles_the_next => LateAnswer::default(),
        closing_fails_what_is_done => ClosingFails::default(),

        submit_blocks => Blocks::new(Call::Submit),
        poll_blocks => Blocks::new(Call::Poll),
        cancel_blocks => Blocks::new(Call::Cancel),
        sever_blocks => Blocks::new(Call::Sever),
        revoke_blocks => Blocks::new(Call::Revoke),
        deregister_blocks => Blocks::new(Call::Deregister),

        settled_twice => SettledTwice::default(),
        done_and_settled => DoneAndSettled,
        settled_never => SettledNever::default(),
        ids_cut_to_32_bits => IdsCut::default(),
        needs_the_target_to_poll => NeedsTheTarget::default(),
        needs_the_initiator_to_poll => NeedsTheInitiator::default(),
        in_flight_limit_ignored => WhenFull::new(Full::TakesMore),
        full_but_posted => WhenFull::new(Full::PostsLater),
        full_for_ever => WhenFull::new(Full::ForEver),
        error_but_posted => ErrorButPosted,
        overfills_the_buffer => Overfills,
        events_lost_among_threads => LostAmongThreads::default(),
        events_only_for_their_poster => OnlyForTheirPoster::default(),
        given_to_every_poller => ToEveryPoller::default(),
        meeting_loses_events => MeetingLosesEvents,

        allocates_dirty_memory => memory::Allocates(memory::dirty),
        allocates_too_little => memory::Allocates(memory::too_little),
        allocates_what_it_shares => memory::AllocatesShared::default(),
        allocates_nothing => memory::Allocates(memory::nothing_for_something),
        small_regions_refused => memory::Registers(memory::small_refused),
        device_memory_taken_for_host => memory::Registers(memory::device_for_host),
        registrations_shared => memory::Shared::default(),
        deregister_ends_overlapping => memory::EndsOverlapping::default(),
        stale_region_accepted => memory::DeregistersNothing,
        unknown_region_accepted => memory::UnknownAccepted,
        registering_slows_down => memory::SlowsDown::default(),
        memory_dropped_in_flight => memory::DroppedInFlight::default(),
        memory_never_released => memory::NeverReleased::default(),
        deregistering_loses_transfers => memory::LosesTransfers::default(),

        import_panics => memory::Imports::new(memory::Import::PanicsOnShort),
        import_panics_on_a_flipped_bit => memory::Imports::new(memory::Import::PanicsOnFlipped),
        cut_key_accepted => memory::Imports::new(memory::Import::FillsUpCut),
        import_blames_the_caller => memory::Imports::new(memory::Import::BlamesCaller),
        foreign_key_accepted => memory::Imports::new(memory::Import::AcceptsForeign),
        key_of_another_peer_accepted => memory::Imports::new(memory::Import::AcceptsPublished),
        released_key_accepted => memory::Releases { honest: false },
        unknown_key_released => memory::Releases { honest: true },
        keys_outlive_the_connection => memory::KeysOutlive::default(),
        key_names_a_slot => memory::KeyNamesSlot::default(),

        incarnation_always_the_same => SameIncarnation,
        initiator_waits_for_finish => WaitsForFinish::default(),
        finish_gives_another_peer => FinishGivesAnother,
        repeated_offer_makes_another_peer => RepeatedOffer::default(),
        crossing_makes_two_peers => CrossingMakesTwo::default(),
        accept_panics => Reads::new(Read::PanicsOnShort),
        cut_offer_accepted => Reads::new(Read::FillsUpCut),
        handshake_blames_the_caller => Reads::new(Read::BlamesCaller),
        steps_mixed_up => Reads::new(Read::MixesSteps),
        reply_to_another_accepted => Reads::new(Read::TakesOthersReplies),
        old_peer_handle_given_again => FirstHandle::new(false),
        incarnations_confused => FirstHandle::new(true),
        connect_to_nobody => ConnectsToNobody,

        cancelled_never_settles => Cancels::new(Cancel::NeverSettles),
        cancelled_called_done => Cancels::new(Cancel::CalledDone),
        cancelled_then_written => Cancels::new(Cancel::ThenWritten),
        cancelling_nothing_accepted => Cancels::new(Cancel::NothingAccepted),
        cancel_takes_all => Cancels::new(Cancel::TakesAll),

        sever_never_settles => Severs::new(Sever::NeverSettles),
        peer_down_missing => Severs::new(Sever::DownMissing),
        peer_down_before_a_settled => Severs::new(Sever::DownFirst),
        peer_down_twice => Severs::new(Sever::DownTwice),
        severed_but_still_writing => Severs::new(Sever::GoesOn),
        stale_peer_accepted => Severs::new(Sever::StaleAccepted),
        unknown_peer_severed => Severs::new(Sever::UnknownAccepted),
        sever_takes_all => Severs::new(Sever::TakesAll),

        revokes_in_name_only => Revokes::new(Revoked::Late),
        revoking_does_not_sever => Revokes::new(Revoked::Never),
        revoking_takes_all => Revokes::new(Revoked::All),

        close_hangs => Closes::new(Close::Hangs),
        close_forgets_transfers => Closes::new(Close::Forgets),
        closing_twice_fails => Closes::new(Close::FailsTwice),
        works_after_close => Closes::new(Close::Nothing),
        leaks_memory => LeaksMemory,
        leaks_a_thread => LeaksThread,
        leaks_a_descriptor => LeaksDescriptor,
        burns_a_processor => BurnsProcessor::default(),

        capabilities_change => CapabilitiesChange,
        capabilities_contradict => CapabilitiesContradict,
        descriptor_without_claim => Descriptor,
        transport_unknown => TransportUnknown,
    }
    "efa": {
        full_batch_cut => data::Changed(data::full_batch_cut),
        pretends_to_revoke => Revokes::new(Revoked::Never),
    }
    "tiny": {
        limit_cut => data::Changed(data::limit_cut),
    }
    "unequal": {
        unequal_limits_refused => data::UnequalLimitsRefused::default(),
    }
    "regions": {
        deregistered_key_still_works => memory::DeregistersNothing,
    }
    "descriptor": {
        descriptor_stays_silent => Descriptor,
    }
}
